"""Order of mixed sets: quotas, epochs, ranks, and equality with a plain computation position by position."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.training.data import sampler
from strata.training.data.finetuning import mixing
from strata.training.data.finetuning.mixing import block_quotas, step_indices

from ...plain import window_at

SMALL_BLOCK = 16


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "LEAST_BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(mixing, "LEAST_QUOTA", 1)
    mixing._arrangement.cache_clear()


def order(count: int, sizes: list[int], weights: list[float], seed: int, batch: int = 8) -> list[int]:
    steps = -(-count // batch)
    return np.concatenate([step_indices(step, batch, 0, 1, sizes, weights, seed) for step in range(steps)]).tolist()[:count]


def sets_of(rows: list[int], sizes: list[int]) -> list[int]:
    return [int(np.searchsorted(np.cumsum(sizes), row, side="right")) for row in rows]


def plain_row(position: int, sizes: list[int], quotas: list[int], seed: int) -> int:
    """Row at a position: the set by a permutation of the block's slots, and the row by the set's own permutation."""

    def stream(number: int) -> int:
        return seed if number == 0 else int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])

    block, offset = divmod(position, sum(quotas))

    def set_at(at: int) -> int:
        slot = window_at(block * sum(quotas) + at, sum(quotas), stream(len(quotas)))
        return next(number for number in range(len(quotas)) if slot < sum(quotas[: number + 1]))

    mine = set_at(offset)
    walked = block * quotas[mine] + sum(set_at(at) == mine for at in range(offset))
    return sum(sizes[:mine]) + window_at(walked, sizes[mine], stream(mine))


@settings(deadline=None)
@given(
    step=st.integers(0, 10**6),
    per_rank=st.integers(1, 9),
    world=st.integers(1, 4),
    size=st.integers(1, 5000),
    seed=st.integers(0, 99),
)
def test_one_set_has_the_order_of_the_sampler(step: int, per_rank: int, world: int, size: int, seed: int) -> None:
    for rank in range(world):
        expected = sampler.step_indices(step, per_rank * world, rank, world, size, seed)
        assert step_indices(step, per_rank * world, rank, world, [size], [0.3], seed).tolist() == expected.tolist()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("sizes", "weights", "quotas"),
    [([5, 30], [1.0, 1.0], [8, 8]), ([1, 7, 3], [2.0, 1.0, 5.0], [4, 2, 10]), ([40, 2], [15.0, 1.0], [15, 1])],
)
def test_order_equals_the_plain_computation(sizes: list[int], weights: list[float], quotas: list[int]) -> None:
    assert list(block_quotas(weights)) == quotas
    for seed in (0, 7):
        assert order(60, sizes, weights, seed) == [plain_row(position, sizes, quotas, seed) for position in range(60)]


@pytest.mark.usefixtures("small_blocks")
@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 50),
)
def test_blocks_have_exact_quotas_and_sets_whole_epochs(sizes: list[int], data: st.DataObject, seed: int) -> None:
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
    quotas = block_quotas(weights)
    block = sum(quotas)
    rows = order(3 * block, sizes, weights, seed, batch=5)
    sets = sets_of(rows, sizes)
    for begin in range(0, len(rows), block):
        assert tuple(Counter(sets[begin : begin + block])[number] for number in range(len(sizes))) == quotas
    for number, size in enumerate(sizes):
        first = sum(sizes[:number])
        mine = [row - first for row, chosen in zip(rows, sets, strict=True) if chosen == number]
        for begin in range(0, len(mine) - size + 1, size):
            assert sorted(mine[begin : begin + size]) == list(range(size))


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_quotas_are_the_largest_remainders(weights: list[float]) -> None:
    quotas = block_quotas(weights)
    total = sum(Fraction(weight) for weight in weights)
    block = sum(quotas)
    assert block >= mixing.LEAST_BLOCK and block & (block - 1) == 0
    for quota, weight in zip(quotas, weights, strict=True):
        exact = Fraction(weight) / total * block
        assert abs(quota - exact) < 1 + 1e-6
        assert abs(quota / exact - 1) <= 1 / mixing.LEAST_QUOTA + 1e-6


def test_largest_remainder_gets_the_last_row() -> None:
    assert block_quotas([700.4, 200.5, 123.1]) == (700, 201, 123)
    assert block_quotas([700.1, 200.3, 123.6]) == (700, 200, 124)


def test_ties_go_to_the_first_set() -> None:
    assert block_quotas([1, 1, 1]) == (342, 341, 341)
    assert block_quotas([1]) == (1024,)
    assert block_quotas([1, 3]) == (256, 768)
    assert block_quotas([1, 9999]) == (52, 524_236)  # a share of 1e-4, rounded by less than 1%


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_of_a_step_do_not_depend_on_the_world_size(world: int) -> None:
    whole = step_indices(300, 8, 0, 1, [50, 9], [1.0, 2.0], 7)
    parts = [step_indices(300, 8, rank, world, [50, 9], [1.0, 2.0], 7) for rank in range(world)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_steps_across_blocks() -> None:
    """A step may have rows of several blocks, and gives the same rows as smaller steps."""
    small = order(2560, [50, 9], [1.0, 2.0], 3, batch=4)
    assert order(2560, [50, 9], [1.0, 2.0], 3, batch=2560) == small
    assert order(2560, [50, 9], [1.0, 2.0], 3, batch=24) == small


def test_seeds_and_blocks_differ() -> None:
    sizes, weights = [1000, 1000], [1.0, 1.0]
    one, other = order(2048, sizes, weights, 0), order(2048, sizes, weights, 1)
    assert sets_of(one, sizes) != sets_of(other, sizes)
    assert sets_of(one[:1024], sizes) != sets_of(one[1024:], sizes)
    first = [row for row in one if row < 1000][:500]
    second = [row - 1000 for row in one if row >= 1000][:500]
    assert first != second  # sets of equal size have different permutations


GOLDEN = [1, 3, 0, 9, 5, 4, 7, 2, 6, 8, 3, 33]


def test_order_is_the_same_in_every_version() -> None:
    """A run of an older version resumes with the same data order."""
    assert order(12, [10, 30], [2.0, 1.0], 5) == GOLDEN


@pytest.mark.parametrize(("sizes", "weights"), [([], []), ([5], [1.0, 1.0]), ([5, 0], [1.0, 1.0]), ([5, 5], [1.0, 0.0])])
def test_impossible_mixtures_are_refused(sizes: list[int], weights: list[float]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        step_indices(0, 4, 0, 1, sizes, weights, 0)
    with pytest.raises(AssertionError):
        step_indices(0, 7, 0, 2, [5], [1.0], 0)
