"""Placement of gangs on nodes: feasibility against brute force, best fit, reservations, and as few blocks as possible."""

import math
import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.planner.cluster.nodes import OPEN, RESERVED, Allocation, Nodes, fits

SIZE = 4


def filled(free: list[int], block: int = 2, compact: bool = False) -> Nodes:
    """Nodes of which each has so many free GPUs."""
    nodes = Nodes(len(free), SIZE, block, compact)
    for node, left in enumerate(free):
        if left < SIZE:
            nodes._set(node, left)
    return nodes


def brute_force(free: list[int], gpus: int) -> bool:
    """True if some whole nodes, and one more node for the rest, have enough."""
    whole, rest = divmod(gpus, SIZE)
    candidates = [node for node, left in enumerate(free) if left == SIZE]
    return any(
        not rest or any(left >= rest for node, left in enumerate(free) if node not in chosen)
        for chosen in combinations(candidates, whole)
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, SIZE), min_size=1, max_size=6), st.integers(1, 26), st.booleans())
def test_a_gang_is_placed_where_it_fits(free: list[int], gpus: int, compact: bool) -> None:
    nodes = filled(free, compact=compact)
    taken = nodes.place(gpus)
    assert fits([free.count(left) for left in range(SIZE + 1)], gpus) == brute_force(free, gpus) == (taken is not None)
    if taken is not None:
        assert sum(count for _, count in taken) == gpus and all(count <= free[node] for node, count in taken)
        assert nodes.idle == sum(free) - gpus
        nodes.release(taken)
    assert nodes.free == free and nodes.stranded == sum(left % SIZE for left in free)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(1, 48))
def test_a_compact_gang_spans_as_few_blocks_as_possible(free: list[int], wanted: int) -> None:
    """`free`: wholly free nodes of each block of eight."""
    nodes = filled([SIZE if node < left else 0 for left in free for node in range(8)], block=8, compact=True)
    taken = nodes.place(wanted * SIZE)
    if sum(free) < wanted:
        assert taken is None
        return
    assert taken
    fewest = next(count for count in range(1, 7) if sum(sorted(free, reverse=True)[:count]) >= wanted)
    assert nodes.spanned(taken) == fewest
    if fewest == 1:  # the tightest block
        assert free[taken[0][0] // 8] == min(left for left in free if left >= wanted)


def test_without_compactness_the_lowest_nodes_are_taken() -> None:
    nodes = filled([4, 0, 4, 4, 4, 4], block=2)
    assert nodes.place(2 * SIZE) == ((0, 4), (2, 4))
    compact = filled([4, 0, 4, 4, 4, 4], block=2, compact=True)
    assert compact.place(2 * SIZE) == ((2, 4), (3, 4))


def test_the_rest_of_a_gang_goes_to_the_tightest_node() -> None:
    assert filled([4, 3, 2, 4]).place(6) == ((0, 4), (2, 2))
    assert filled([3, 4, 1, 4]).place(2) == ((0, 2),)
    assert filled([4, 4, 1, 4]).place(2) == ((0, 2),)


def test_a_compact_rest_stays_in_the_block_of_its_gang() -> None:
    assert filled([4, 3, 2, 0], block=2, compact=True).place(6) == ((0, 4), (1, 2))


def test_small_jobs_leave_whole_blocks_free() -> None:
    assert filled([4, 4, 0, 4], block=2, compact=True).place(1) == ((3, 1),)
    assert filled([4, 4, 0, 4], block=2).place(1) == ((0, 1),)


def test_reserved_nodes_are_used_only_where_allowed() -> None:
    nodes = Nodes(3, SIZE, 2, False)
    nodes.reserve([0, 2])
    assert nodes.place(2 * SIZE, OPEN) is None
    assert nodes.place(SIZE, OPEN) == ((1, 4),)
    assert nodes.place(2, RESERVED) == ((0, 2),)
    assert nodes.place(SIZE + 2) == ((2, 4), (0, 2))
    nodes.open([0, 2])
    nodes.release(((0, 4), (1, 4), (2, 4)))
    assert nodes.place(3 * SIZE, OPEN) == ((0, 4), (1, 4), (2, 4))


def test_nodes_for_a_reservation_are_busy_ones_first() -> None:
    nodes = filled([0, 4, 2, 4, 4])
    assert nodes.enough(2 * SIZE, {0: 4}) == [0, 4]
    assert nodes.enough(SIZE + 2, {0: 4, 2: 3}) == [0, 2]
    assert nodes.enough(SIZE + 1, {0: 4}) == [0, 2]


def test_a_gpu_is_not_given_twice() -> None:
    nodes = Nodes(1, SIZE, 2, False)
    taken = nodes.place(3)
    assert taken
    nodes.release(taken)
    with pytest.raises(AssertionError, match="twice"):
        nodes.release(taken)


def test_random_use_returns_every_gpu() -> None:
    chance = random.Random(3)
    nodes, held = Nodes(40, 8, 8, True), list[Allocation]()
    for _ in range(2000):
        if chance.random() < 0.55 and (taken := nodes.place(math.ceil(chance.paretovariate(0.8)))):
            held.append(taken)
        elif held:
            nodes.release(held.pop(chance.randrange(len(held))))
        assert nodes.idle == 320 - sum(count for taken in held for _, count in taken) == sum(nodes.free)
        assert nodes.stranded == sum(left % 8 for left in nodes.free)
