"""sample on a GPU against the reference, token for token: vocabularies, dtypes, filters, masks, penalties, CUDA graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.sample.kernel import candidates, sample_triton
from strata.kernels.ops.sample.sample import Penalties, penalized, reference, sample, token_counts
from strata.kernels.tuning.tunable import architecture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")


def settings(rows: int) -> dict[str, Tensor]:
    number = torch.arange(rows, device=CUDA)
    return {
        "seeds": number * 2**40 + 7,
        "steps": number + 3,
        "temperature": torch.where(number % 8 == 3, 0.0, 0.5 + number / rows),
        "top_k": torch.where(number % 3 == 0, 0, number * 3 + 1).int(),
        "top_p": torch.where(number % 2 == 0, 1.0, number / rows),
        "min_p": torch.where(number % 5 < 3, 0.0, 0.01),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("vocabulary", [1, 255, 257, 32_000, 50_257, 151_936, 262_145])
def test_tokens_of_the_reference(vocabulary: int, spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(vocabulary)
    logits = (torch.randn(48, vocabulary, device=CUDA) * spread).to(dtype)
    given = settings(48)
    for names in ((), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")):
        used: dict[str, Any] = {name: given[name] for name in ("seeds", "steps", "temperature", *names)}
        assert sample(logits, **used).tolist() == reference(logits, **used).tolist(), names


def test_masked_rows() -> None:
    """A grammar allows a few tokens, or one."""
    logits = torch.full((64, 151_936), -torch.inf, device=CUDA)
    for row in range(64):
        logits[row, torch.randperm(151_936, device=CUDA)[: row + 1]] = torch.randn(row + 1, device=CUDA)
    given = settings(64)
    tokens = sample(logits, **given)
    assert tokens.tolist() == reference(logits, **given).tolist()
    assert torch.isfinite(logits.gather(1, tokens[:, None])).all()


def test_equal_logits() -> None:
    logits, given = torch.zeros(16, 151_936, device=CUDA), settings(16)
    assert sample(logits, **given).tolist() == reference(logits, **given).tolist()


def test_rows_of_a_wider_tensor() -> None:
    logits, given = torch.randn(16, 40_001, device=CUDA)[:, 1:32_001], settings(16)
    assert sample(logits, **given).tolist() == reference(logits.contiguous(), **given).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties(dtype: torch.dtype) -> None:
    logits, given = torch.randn(16, 32_000, device=CUDA).to(dtype), settings(16)
    histories = [torch.randint(0, 32_000, (2000,)).tolist() for _ in range(16)]
    tokens, counts = token_counts(histories, [history[:500] * 2 for history in histories])
    strengths = [torch.rand(16, device=CUDA) + shift for shift in (1.0, -0.5, -0.5)]
    penalties = Penalties(tokens.to(CUDA), counts.to(CUDA), *strengths)
    expected, token = penalized(logits, penalties), reference(logits, **given, penalties=penalties)
    assert sample(logits, **given, penalties=penalties).tolist() == token.tolist()
    assert torch.equal(logits, expected)


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, given = torch.randn(40, 151_936, device=CUDA) * 2, settings(40)
    together = sample(logits, **given)
    for row in range(40):
        alone = sample(logits[row : row + 1], **{name: value[row : row + 1] for name, value in given.items()})
        assert alone.item() == together[row].item()


def test_every_launch_configuration() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits, given = torch.randn(40, 151_936, device=CUDA).to(dtype) * 2, settings(40)
        expected = reference(logits, **given).tolist()
        for candidate in candidates(architecture(CUDA), (logits.element_size(),)):
            tokens = sample_triton(logits, *given.values(), *(None,) * 5, chosen=candidate.arguments())
            assert tokens.tolist() == expected, candidate


def test_in_a_cuda_graph() -> None:
    logits, given = torch.randn(32, 151_936, device=CUDA), settings(32)
    sample(logits, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, **given)
    for _ in range(3):
        logits.normal_()
        given["steps"] += 1
        graph.replay()
        assert tokens.tolist() == reference(logits, **given).tolist()
