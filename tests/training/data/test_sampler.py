import numpy as np
import pytest

from strata.platform.recipe import ParallelSection
from strata.training.data.sampler import rank_indices, shuffled, step_indices
from strata.training.layout import place


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


def test_no_window_is_repeated_or_dropped_while_layouts_change() -> None:
    """Each step has another layout, as if the run had been resumed before it. Ranks with the same data-parallel rank read the
    same windows, others read different ones, and an epoch has each window once."""
    windows, batch, seed = 120, 8, 3
    seen: list[int] = []
    for step in range(2 * windows // batch):
        parallel = LAYOUTS[step % len(LAYOUTS)]
        by_data_rank: dict[int, list[int]] = {}
        for rank in range(parallel.workers):
            mine = rank_indices(step, rank, batch, windows, seed, parallel).tolist()
            assert by_data_rank.setdefault(place(rank, parallel).data, mine) == mine
        assert len(by_data_rank) == parallel.data
        seen += [window for mine in by_data_rank.values() for window in mine]
    assert sorted(seen[:windows]) == sorted(seen[windows:]) == list(range(windows))
