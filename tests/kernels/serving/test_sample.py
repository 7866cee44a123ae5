"""sample: the CPU implementation and the interpreted Triton kernel against definitions in plain Python, token for token."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.sample.kernel import sample_triton
from strata.kernels.ops.sample.noise import TOKENS, log2_noise, philox
from strata.kernels.ops.sample.sample import Penalties, candidate_mask, penalized, reference, sample, scaled, token_counts

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the compiled kernel")


def by_definition(x: list[float], k: int, p: float, min_p: float) -> set[int]:
    """Candidates of log2 weights, one token at a time."""
    chosen = [token for token in range(len(x)) if min_p <= 0 or 2 ** (x[token] - max(x)) >= min_p]
    if 0 < k < len(x):
        last = sorted(x, reverse=True)[k - 1]
        chosen = [token for token in chosen if x[token] >= last]
    if p < 1:
        total = math.fsum(2 ** (x[token] - max(x)) for token in chosen)
        for last in sorted({x[token] for token in chosen}, reverse=True):
            if math.fsum(2 ** (x[token] - max(x)) for token in chosen if x[token] >= last) >= p * total:
                chosen = [token for token in chosen if x[token] >= last]
                break
    return set(chosen)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "k, p, min_p", [(0, 1, 0), (3, 1, 0), (0, 0.6, 0), (0, 1, 0.2), (9, 0.8, 0.05), (40, 0.99, 0), (0, 0, 0), (1, 0.5, 1)]
)
def test_candidates_are_those_of_the_definition(ties: bool, k: int, p: float, min_p: float) -> None:
    torch.manual_seed(k)
    x = torch.randn(6, 40) * 2
    x = x.round() if ties else x
    mask = candidate_mask(x, torch.full((6,), k, dtype=torch.int32), torch.full((6,), float(p)), torch.full((6,), float(min_p)))
    for row in range(6):
        assert set(mask[row].nonzero().flatten().tolist()) == by_definition(x[row].tolist(), k, p, min_p)


def settings(rows: int) -> dict[str, Tensor]:
    """Rows with each filter alone, with all, and with none; the second half greedy every fourth row."""
    number = torch.arange(rows)
    return {
        "seeds": number * 2**40 + 7,
        "steps": number + 3,
        "temperature": torch.where(number % 4 == 3, 0.0, 0.5 + number / rows),
        "top_k": torch.where(number % 3 == 0, 0, number * 3 + 1).int(),
        "top_p": torch.where(number % 2 == 0, 1.0, number / rows),
        "min_p": torch.where(number % 5 < 3, 0.0, 0.05),
    }


def run_triton(logits: Tensor, penalties: Penalties | None = None, chosen: dict[str, int] | None = None, **given: Any) -> Tensor:
    names = ("seeds", "steps", "temperature", "top_k", "top_p", "min_p")
    return sample_triton(logits, *(given.get(name) for name in names), *(penalties or (None,) * 5), chosen=chosen)  # type: ignore[arg-type]


@interpreted
@pytest.mark.parametrize(
    "vocabulary, spread, dtype",
    [(1, 1, torch.float32), (700, 3, torch.bfloat16), (1031, 0.3, torch.float32), (16_500, 2, torch.float32)],
)
def test_kernel_draws_the_token_of_the_reference(vocabulary: int, spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(vocabulary)
    logits = (torch.randn(8, vocabulary) * spread).to(dtype)
    given = settings(8)
    assert run_triton(logits, **given).tolist() == reference(logits, **given).tolist()


@interpreted
@pytest.mark.parametrize("vocabulary", [700, pytest.param(6000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("filters", ["top-k", "top-p", "both"])
@pytest.mark.parametrize("last", [True, False])
def test_search_among_many_candidates_is_exact(vocabulary: int, filters: str, last: bool) -> None:
    """The token with the least noise, which an almost flat row draws, is the last one that passes, or the first that does not.
    6000 candidates do not fit the buffer: the search reads the row."""
    passing = vocabulary * 3 // 5
    given = {"seeds": torch.tensor([5]), "steps": torch.tensor([0]), "temperature": torch.ones(1)}
    least = int(log2_noise(given["seeds"], given["steps"], torch.arange(vocabulary), TOKENS).argmin())
    ranks = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))
    place = passing - 1 if last else passing
    other = int((ranks == place).nonzero())
    ranks[other], ranks[least] = int(ranks[least]), place
    logits = 0.01 - 2e-8 * ranks.float()[None]  # equal weights almost, so that a share of them is a number of tokens
    of = vocabulary if filters == "top-p" else passing if filters == "top-k" else passing + vocabulary // 5
    if filters != "top-p":
        given["top_k"] = torch.tensor([of], dtype=torch.int32)
    if filters != "top-k":
        given["top_p"] = torch.tensor([(passing - 0.5) / of])
    drawn = run_triton(logits, **given).tolist()
    assert drawn == reference(logits, **given).tolist()
    assert (drawn == [least]) == last


@interpreted
def test_masked_tokens_and_ties() -> None:
    logits = torch.full((3, 600), -torch.inf)
    logits[0, 590] = 1.0
    logits[1, ::2] = 2.0
    logits[2, 100:110] = 0.0
    given = {"seeds": torch.arange(3), "steps": torch.arange(3), "temperature": torch.ones(3)}
    for filters in ({}, {"top_k": torch.full((3,), 4, dtype=torch.int32)}, {"top_p": torch.full((3,), 0.5)}):
        tokens = run_triton(logits, **given, **filters)
        assert tokens.tolist() == reference(logits, **given, **filters).tolist()
        assert torch.isfinite(logits[torch.arange(3), tokens]).all()
    assert run_triton(logits, **given | {"temperature": torch.zeros(3)}).tolist() == [590, 0, 100]


@interpreted
def test_penalties_in_the_kernel() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 300)
    penalties = Penalties(
        *token_counts([[1, 2, 2, 299], [], [5]], [[2, 2, 7], [0], []]),
        torch.tensor([1.3, 1.0, 2.0]),
        torch.tensor([0.2, 0.5, 1.0]),
        torch.tensor([0.1, -0.5, 1.0]),
    )
    expected = penalized(logits, penalties)
    given = {"seeds": torch.arange(3), "steps": torch.arange(3), "temperature": torch.ones(3)}
    token = reference(logits, **given, penalties=penalties)
    assert run_triton(logits, penalties, **given).tolist() == token.tolist()
    assert torch.equal(logits, expected)


def test_penalties_are_those_of_the_definition() -> None:
    tokens, counts = token_counts([[1, 2, 2]], [[2, 2, 3]])
    assert dict(zip(tokens[0].tolist(), counts[0].tolist(), strict=True)) == {1: 0, 2: 2, 3: 1}
    penalties = Penalties(tokens, counts, torch.tensor([2.0]), torch.tensor([0.25]), torch.tensor([0.5]))
    logits = torch.tensor([[1.0, 1.0, -1.0, 3.0]])
    assert penalized(logits, penalties).tolist() == [[1.0, 0.5, -2.0 - 2 * 0.25 - 0.5, 1.5 - 0.25 - 0.5]]
    sample(logits, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.ones(1), penalties=penalties)
    assert logits.tolist() == [[1.0, 0.5, -3.0, 0.75]]


def test_philox_has_the_published_numbers() -> None:
    """Known answers of Philox4x32-10, from the Random123 distribution."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert philox(zero, zero, zero, 0).item() == 0x6627E8D5


def test_draws_have_the_probabilities_of_the_logits() -> None:
    """Chi-squared over 4,000 seeds, unfiltered over several segments of tokens, and filtered."""
    torch.manual_seed(0)
    count = 4_000
    logits = torch.randn(1, 300) * 2
    seeds, steps = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for top_k in (None, torch.full((count,), 12, dtype=torch.int32)):
        drawn = sample(logits.repeat(count, 1), seeds, steps, torch.full((count,), 1.5), top_k)
        mask = candidate_mask(scaled(logits, torch.tensor([1.5])), None if top_k is None else top_k[:1], None, None)
        expected = torch.where(mask, logits / 1.5, -torch.inf).softmax(1)[0].double() * count
        found = torch.bincount(drawn, minlength=300).double()
        assert found[~mask[0]].sum() == 0
        common = expected > 5
        chi = ((found - expected)[common] ** 2 / expected[common]).sum()
        freedom = int(common.sum())
        assert abs(float(chi) - freedom) < 4 * math.sqrt(2 * freedom)


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits, given = torch.randn(9, 500), settings(9)
    together = sample(logits, **given)
    for row in range(9):
        alone = sample(logits[row : row + 1], **{name: value[row : row + 1] for name, value in given.items()})
        assert alone.item() == together[row].item()
    assert not torch.equal(sample(logits, **given | {"steps": given["steps"] + 1}), together)


@pytest.mark.slow
@interpreted
def test_tokens_do_not_depend_on_the_launch_configuration() -> None:
    logits, given = torch.randn(2, 900), settings(4)
    given = {name: value[1:3].contiguous() for name, value in given.items()}
    chosen = {"GATHER": 256, "BLOCK": 256, "FEW": 16, "AT_ONCE": 16}
    assert run_triton(logits, chosen=chosen, **given).tolist() == run_triton(logits, **given).tolist()


@pytest.mark.slow
def test_opcheck() -> None:
    given = settings(3)
    arguments = (torch.randn(3, 50), *given.values(), *(None,) * 5)
    torch.library.opcheck(torch.ops.strata.sample.default, arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": torch.zeros(4, 3, 5)}, r"logits \[rows, vocabulary\].*got \[4, 3, 5\]"),
        ({"logits": torch.zeros(4, 5, dtype=torch.int32)}, "torch.int32"),
        ({"logits": torch.zeros(5, 4).T}, "contiguous rows"),
        ({"logits": torch.zeros(4, 0)}, "at least one token"),
        ({"seeds": torch.zeros(3, dtype=torch.int64)}, r"seeds \[4\] in torch.int64"),
        ({"steps": torch.zeros(4)}, "steps.*torch.float32"),
        ({"temperature": torch.ones(8)[::2]}, "temperature.*contiguous"),
        ({"top_k": torch.ones(4, dtype=torch.int64)}, "top_k.*torch.int32"),
        ({"top_p": torch.ones(1)}, "top_p"),
        ({"min_p": torch.ones(4).double()}, "min_p"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, Tensor], message: str) -> None:
    numbers = torch.zeros(4, dtype=torch.int64)
    arguments: dict[str, Any] = {"logits": torch.zeros(4, 5), "seeds": numbers, "steps": numbers, "temperature": torch.ones(4)}
    with pytest.raises(ValueError, match=message):
        sample(**arguments | change)
