from itertools import product

import numpy as np
import pytest

from strata.platform.recipe import ParallelSection
from strata.training.data.sampler import shuffled, step_indices
from strata.training.layout import place

from ..plain import scheduled_windows, window_at


def epoch(count: int, seed: int, number: int) -> list[int]:
    return shuffled(np.arange(count), count, seed, number).tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 1000, 4097])
def test_epoch_contains_every_window_once(count: int) -> None:
    assert sorted(epoch(count, 5, 2)) == list(range(count))


def test_seeds_and_epochs_differ_and_repeat() -> None:
    orders = [epoch(500, 0, 0), epoch(500, 0, 1), epoch(500, 1, 0), list(range(500))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert epoch(500, 0, 0) == orders[0]


def test_order_looks_random() -> None:
    """Positions and windows are uncorrelated, and neighbours in the order are not neighbours in the text."""
    order = np.array(epoch(10_000, 0, 0))
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(order)) <= 2) < 0.01


def test_consecutive_steps_cover_each_epoch() -> None:
    windows, batch = 37, 8
    seen = np.concatenate([step_indices(step, batch, 0, 1, windows, 3) for step in range(37)])  # 8 epochs
    assert (np.bincount(seen, minlength=windows) == batch).all()
    for begin in range(0, len(seen), windows):
        assert sorted(seen[begin : begin + windows]) == list(range(windows))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_windows_of_a_step_do_not_depend_on_the_world_size(world: int) -> None:
    whole = step_indices(11, 8, 0, 1, 50, 7)
    parts = np.concatenate([step_indices(11, 8, rank, world, 50, 7) for rank in range(world)])
    assert parts.tolist() == whole.tolist()


LAYOUTS = (
    ParallelSection(workers=4),
    ParallelSection(workers=8, tensor=2, pipeline=2),
    ParallelSection(workers=4, sequence=2),
    ParallelSection(workers=2, pipeline=2),
    ParallelSection(workers=4, expert=4),
)


def rank_windows(step: int, rank: int, batch: int, windows: int, seed: int, parallel: ParallelSection) -> list[int]:
    indices: list[int] = step_indices(step, batch, place(rank, parallel).data, parallel.data, windows, seed).tolist()
    return indices


def test_no_window_is_repeated_or_dropped_while_layouts_change() -> None:
    """Each step has another layout, as if the run had been resumed before it. Ranks with the same data-parallel rank read the
    same windows, others read different ones, and an epoch has each window once."""
    windows, batch, seed = 120, 8, 3
    seen: list[int] = []
    for step in range(2 * windows // batch):
        parallel = LAYOUTS[step % len(LAYOUTS)]
        by_data_rank: dict[int, list[int]] = {}
        for rank in range(parallel.workers):
            mine = rank_windows(step, rank, batch, windows, seed, parallel)
            assert by_data_rank.setdefault(place(rank, parallel).data, mine) == mine
        assert len(by_data_rank) == parallel.data
        seen += [window for mine in by_data_rank.values() for window in mine]
    assert sorted(seen[:windows]) == sorted(seen[windows:]) == list(range(windows))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 64, 65, 1000, 4096, 4097])
def test_order_equals_the_plain_algorithm(count: int) -> None:
    for seed, number in ((0, 0), (0, 3), (7, 1)):
        positions = range(count)[-20:]
        expected = [window_at(number * count + position, count, seed) for position in positions]
        assert shuffled(np.array(positions), count, seed, number).tolist() == expected


GOLDEN = (
    [0, 10, 3, 7, 6, 1, 9, 8, 4, 2, 5, 11],
    [6, 0, 10, 5, 3, 11, 1, 4, 2, 8, 7, 9],
    [187144478611, 832648685812, 245025068886, 316311517081, 540437959969],
)


def test_order_is_the_same_in_every_version() -> None:
    """A run of an older version resumes with the same data order."""
    assert epoch(12, 0, 0) == GOLDEN[0]
    assert epoch(12, 0, 1) == GOLDEN[1]
    assert shuffled(np.arange(5), 10**12, 42, 3).tolist() == GOLDEN[2]


@pytest.mark.parametrize("step", [0, 1, 4, 5, 23])
@pytest.mark.parametrize(("batch", "world"), [(6, 1), (6, 2), (6, 6), (12, 4)])
def test_ranks_of_a_step_read_consecutive_parts_of_the_batch(step: int, batch: int, world: int) -> None:
    """Steps 4 and 5 of 6 sequences cross the end of an epoch of 29 windows."""
    expected = scheduled_windows(step, batch, 29, 3)
    found = [step_indices(step, batch, rank, world, 29, 3).tolist() for rank in range(world)]
    assert [len(mine) for mine in found] == [batch // world] * world
    assert [window for mine in found for window in mine] == expected


def test_batch_that_ranks_cannot_divide_is_refused() -> None:
    with pytest.raises(AssertionError):
        step_indices(0, 7, 0, 2, 50, 0)


def test_only_the_data_parallel_rank_selects_the_windows() -> None:
    """Ranks are ordered by stage, data, sequence and tensor; the second of these coordinates selects a third of the batch."""
    parallel = ParallelSection(workers=24, tensor=2, pipeline=2, sequence=2)
    whole = scheduled_windows(5, 6, 40, 1)
    for rank, (_, data, _, _) in enumerate(product(range(2), range(3), range(2), range(2))):
        assert rank_windows(5, rank, 6, 40, 1, parallel) == whole[2 * data : 2 * data + 2]
