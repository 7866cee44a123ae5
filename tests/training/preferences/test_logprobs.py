"""Document log-probabilities against the plain computation, in chunks and over ranks."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.training import chunked_logits
from strata.training.preferences import logprobs
from strata.training.preferences.logprobs import document_logprobs

from ..parallel.ranks import on_ranks
from .sharded import CASE, case, loss_and_gradients, on_this_rank

VOCABULARY, WIDTH = 7, 3


@pytest.fixture(params=[1, 3, 1000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Tokens per chunk in fp64: single tokens, a last chunk that is smaller, one chunk."""
    monkeypatch.setitem(chunked_logits.LOGIT_BYTES, "cpu", VOCABULARY * 8 * request.param)
    yield request.param


def plain(
    x_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, document_n: Tensor, documents: int, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = x_nd @ weight_vd.T
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logp_nv = F.log_softmax(logits, dim=-1)
    sums, counts = [], []
    for document in range(documents):
        mine = [n for n in range(len(x_nd)) if document_n[n] == document and targets_n[n] != -100]
        sums.append(sum((logp_nv[n, targets_n[n]] for n in mine), logits.new_zeros(())))
        counts.append(len(mine))
    return torch.stack(sums), torch.tensor(counts)


def inputs(dtype: torch.dtype = torch.float64, tokens: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Five documents: one has no tokens at all, one no counted ones, and the order is mixed."""
    generator = torch.Generator().manual_seed(3)
    x_nd = torch.randn(tokens, WIDTH, generator=generator, dtype=dtype)
    weight_vd = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype) * 2
    targets_n = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    document_n = torch.tensor([0, 0, 3, 3, 1, 0, 4, 4, 4, 3])[:tokens]
    targets_n[[1, 4, 7]] = -100
    return x_nd, weight_vd, targets_n, document_n


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values_and_counts(chunk: int, softcap: float | None) -> None:
    found, counts = document_logprobs(*inputs(), 5, softcap)
    expected, expected_counts = plain(*inputs(), 5, softcap)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    assert counts.tolist() == expected_counts.tolist() == [2, 0, 0, 3, 2]
    assert found[1] == found[2] == 0


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients(chunk: int, softcap: float | None) -> None:
    x_nd, weight_vd, targets_n, document_n = inputs()

    def values(x_nd: Tensor, weight_vd: Tensor) -> Tensor:
        return document_logprobs(x_nd, weight_vd, targets_n, document_n, 5, softcap)[0]

    assert torch.autograd.gradcheck(values, (x_nd.requires_grad_(), weight_vd.requires_grad_()))
    assert torch.autograd.gradcheck(lambda x: values(x, weight_vd.detach()), x_nd)
    assert torch.autograd.gradcheck(lambda weight: values(x_nd.detach(), weight), weight_vd)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_single_precision(monkeypatch: pytest.MonkeyPatch, softcap: float | None) -> None:
    """A document of 300 tokens, a vocabulary of 200 and 16 chunks, against fp64."""
    monkeypatch.setitem(chunked_logits.LOGIT_BYTES, "cpu", 200 * 4 * 40)
    generator = torch.Generator().manual_seed(5)
    x_nd, weight_vd = (torch.randn(n, 64, generator=generator) / 4 for n in (600, 200))
    targets_n = torch.randint(0, 200, (600,), generator=generator)
    document_n = torch.arange(600) // 300
    results = []
    for dtype in (torch.float32, torch.float64):
        x, weight = (each.detach().to(dtype, copy=True).requires_grad_() for each in (x_nd, weight_vd))
        compute = document_logprobs if dtype == torch.float32 else plain
        found, _ = compute(x, weight, targets_n, document_n, 2, softcap)
        assert found.dtype == dtype
        (found * torch.tensor([1.0, -0.5])).sum().backward()
        assert x.grad is not None and weight.grad is not None
        results.append([found.detach().double(), x.grad.double(), weight.grad.double()])
    for single, double in zip(*results, strict=True):
        assert ((single - double).norm() / double.norm()).item() < 1e-6


def test_half_precision_sums_in_single(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient is a sum over chunks: in bf16, single tokens would vanish in it."""
    monkeypatch.setitem(chunked_logits.LOGIT_BYTES, "cpu", 4 * 4)
    x_nd = torch.ones(1024, 2, dtype=torch.bfloat16)
    weight_vd = torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    targets_n, document_n = torch.zeros(1024, dtype=torch.int64), torch.zeros(1024, dtype=torch.int64)
    found, _ = document_logprobs(x_nd, weight_vd, targets_n, document_n, 1)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1024 * torch.tensor(0.25).log().item(), rel=1e-6)
    found.backward()
    assert weight_vd.grad is not None and weight_vd.grad.dtype == torch.bfloat16
    assert weight_vd.grad[:, 0].tolist() == [768, -256, -256, -256]


def test_no_counted_tokens_have_zero_gradients() -> None:
    """A rank without counted tokens still has gradients to reduce."""
    x_nd, weight_vd, targets_n, document_n = inputs()
    x_nd.requires_grad_()
    weight_vd.requires_grad_()
    found, counts = document_logprobs(x_nd, weight_vd, torch.full_like(targets_n, -100), document_n, 5)
    assert found.tolist() == counts.tolist() == [0] * 5
    found.sum().backward()
    assert x_nd.grad is not None and weight_vd.grad is not None
    assert not x_nd.grad.any() and not weight_vd.grad.any()


def test_uncounted_tokens_may_belong_to_no_document() -> None:
    x_nd, weight_vd, targets_n, document_n = inputs()
    padded = document_n.where(targets_n != -100, -1)
    assert torch.equal(document_logprobs(x_nd, weight_vd, targets_n, padded, 5)[0], document_logprobs(*inputs(), 5)[0])


def test_logits_of_all_tokens_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked_logits.LOGIT_BYTES, "cpu", VOCABULARY * 8 * 4)
    sizes = []
    logits = logprobs.logits_of

    def counted(x_nd: Tensor, weight_vd: Tensor, softcap: float | None) -> Tensor:
        sizes.append(len(x_nd))
        return logits(x_nd, weight_vd, softcap)

    monkeypatch.setattr(logprobs, "logits_of", counted)
    x_nd, *others = inputs()
    document_logprobs(x_nd.requires_grad_(), *others, 5)[0].sum().backward()
    assert sizes == [4, 3, 4, 3]  # seven counted tokens, forward and backward


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_nd": torch.zeros(10, 4)}, r"expected x \[tokens, width\] .* got \[10, 4\], \[7, 3\]"),
        ({"x_nd": torch.zeros(2, 5, 3)}, r"expected x \[tokens, width\]"),
        ({"weight_vd": torch.zeros(3)}, r"expected x \[tokens, width\]"),
        ({"targets_n": torch.zeros(9, dtype=torch.int64)}, r"a target and a document for each of 10 tokens, got \[9\], \[10\]"),
        ({"document_n": torch.zeros(11, dtype=torch.int64)}, r"got \[10\], \[11\]"),
        ({"documents": 4}, "document_n has the index 4, but there are 4 documents"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"targets_n": torch.full((10,), VOCABULARY)}, "out of bounds"),
        ({"targets_n": torch.full((10,), -1)}, "out of bounds"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, object], message: str) -> None:
    names = ("x_nd", "weight_vd", "targets_n", "document_n")
    given = dict(zip(names, inputs(torch.float32), strict=True)) | {"documents": 5} | change
    with pytest.raises((ValueError, RuntimeError), match=message):
        document_logprobs(**given)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_documents_split_over_ranks(world: int) -> None:
    """Every rank has a slice of the tokens and computes the same loss. Gradients are averaged, as for losses that differ."""
    expected_loss, expected_dx, expected_dweight = loss_and_gradients(*case(), lambda values: values)
    results = on_ranks(world, on_this_rank, CASE)
    for loss, *_ in results:
        assert loss == pytest.approx(expected_loss, rel=1e-12)
    dx = np.concatenate([dx for _, dx, _ in results]) / world
    dweight = np.mean([dweight for *_, dweight in results], axis=0)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dweight, expected_dweight, rtol=1e-10, atol=1e-12)
