"""Collective algorithms step by step: the chunks that each rank sends to each other rank.

`run` executes the steps on buffers that only record the ranks whose data they hold. This proves an algorithm correct without
numbers. A real implementation overlaps the steps chunk by chunk and sends the same bytes, which `patterns.py` counts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal


@dataclass(frozen=True)
class Transfer:
    """One send. "add": the target adds the data to its own; "copy": the target overwrites its own."""

    source: int
    target: int
    chunks: tuple[int, ...]
    action: Literal["copy", "add"]


Step = list[Transfer]
Held = Counter[int]  # number of times each rank's data is in a chunk
Buffers = list[dict[int, Held]]  # by node, then by chunk


@dataclass(frozen=True)
class Algorithm:
    """An algorithm on buffers of `chunks` equal chunks. `nodes` are the ranks, followed by switches that reduce."""

    name: str
    ranks: int
    chunks: int
    steps: list[Step]
    switches: int = 0

    @property
    def nodes(self) -> int:
        return self.ranks + self.switches

    def sent(self, rank: int) -> float:
        """Bytes sent per byte of the buffer."""
        return sum(len(one.chunks) for step in self.steps for one in step if one.source == rank) / self.chunks

    def received(self, rank: int) -> float:
        return sum(len(one.chunks) for step in self.steps for one in step if one.target == rank) / self.chunks


def run(steps: list[Step], buffers: Buffers) -> Buffers:
    """Run the steps. All transfers of a step read the buffers as they were before the step."""
    buffers = [dict(held) for held in buffers]
    for step in steps:
        arriving = [(one, chunk, buffers[one.source][chunk]) for one in step for chunk in one.chunks]
        for one, chunk, held in arriving:
            there = buffers[one.target].get(chunk)
            buffers[one.target][chunk] = there + held if one.action == "add" and there is not None else held
    return buffers


def ring(ranks: int) -> Algorithm:
    """Ring all-reduce: a reduce-scatter, then an all-gather, each once around the ring."""
    members, groups = list(range(ranks)), [(chunk,) for chunk in range(ranks)]
    return Algorithm("ring", ranks, ranks, reduce_scatter(members, groups) + all_gather(members, groups))


def reduce_scatter(members: list[int], groups: Sequence[tuple[int, ...]]) -> list[Step]:
    """Ring reduce-scatter. Member i ends with the sum of group i + 1, modulo the number of members."""
    n = len(members)
    return [
        [Transfer(members[i], members[(i + 1) % n], groups[(i - step) % n], "add") for i in range(n)] for step in range(n - 1)
    ]


def all_gather(members: list[int], groups: Sequence[tuple[int, ...]]) -> list[Step]:
    """Ring all-gather, from the state in which `reduce_scatter` ends."""
    n = len(members)
    return [
        [Transfer(members[i], members[(i + 1) % n], groups[(i + 1 - step) % n], "copy") for i in range(n)]
        for step in range(n - 1)
    ]


def tree(ranks: int) -> Algorithm:
    """Tree all-reduce: sums go up, results come down."""
    return Algorithm("tree", ranks, 1, up_and_down([parent(rank, ranks) for rank in range(ranks)], 0))


def double_tree(ranks: int) -> Algorithm:
    """Double binary tree: one tree for each half of the buffer.

    The second tree mirrors the first, or is shifted by one rank for an odd number. Inner nodes of one tree are leaves of the
    other, so all ranks send about the same.
    """
    first = [parent(rank, ranks) for rank in range(ranks)]
    second: list[int | None] = [None] * ranks
    for rank, above in enumerate(first):
        second[_other(rank, ranks)] = None if above is None else _other(above, ranks)
    steps = together([up_and_down(first, 0), up_and_down(second, 1)])
    return Algorithm("double_tree", ranks, 2, steps)


def _other(rank: int, ranks: int) -> int:
    return (rank + 1) % ranks if ranks % 2 else ranks - 1 - rank


def parent(rank: int, ranks: int) -> int | None:
    """Parent in NCCL's binary tree (`src/graph/trees.cc`), by the lowest set bit: every odd rank is a leaf."""
    if rank == 0:
        return None
    bit = rank & -rank
    above = (rank ^ bit) | (bit << 1)
    return above if above < ranks else rank ^ bit


def up_and_down(parents: list[int | None], chunk: int) -> list[Step]:
    """A reduction up the tree and a broadcast down. A node sends up once all its children have sent, and down in the step after
    its parent has sent."""
    ranks = len(parents)
    heights, depths = [0] * ranks, list[int]()
    for rank in range(ranks):
        above, steps = parents[rank], 1
        while above is not None:
            heights[above] = max(heights[above], steps)
            above, steps = parents[above], steps + 1
        depths.append(steps - 1)
    up = [
        [Transfer(rank, above, (chunk,), "add") for rank, above in enumerate(parents) if above is not None and heights[rank] == h]
        for h in range(max(heights))
    ]
    down = [
        [Transfer(above, rank, (chunk,), "copy") for rank, above in enumerate(parents) if above is not None and depths[rank] == d]
        for d in range(1, max(depths) + 1)
    ]
    return up + down


def nvls(ranks: int) -> Algorithm:
    """NVLink SHARP all-reduce. The switch is the node after the last rank.

    The switch sums the chunks of all ranks. Each rank fetches the sum of its shard and sends it back once, and the switch
    multicasts it.
    """
    switch, everything = ranks, tuple(range(ranks))
    steps: list[Step] = [
        [Transfer(rank, switch, everything, "add") for rank in range(ranks)],
        [Transfer(switch, rank, (rank,), "copy") for rank in range(ranks)],
        [Transfer(rank, switch, (rank,), "copy") for rank in range(ranks)],
        [Transfer(switch, rank, everything, "copy") for rank in range(ranks)],
    ]
    return Algorithm("nvls", ranks, ranks, steps, switches=1)


def halving_doubling(ranks: int) -> Algorithm:
    """Recursive halving and doubling. Ranks beyond the largest power of two send their data to a partner first and receive the
    result at the end."""
    core = 1 << (ranks.bit_length() - 1)
    everything = tuple(range(core))
    before: Step = [Transfer(rank, rank - core, everything, "add") for rank in range(core, ranks)]
    after: Step = [Transfer(rank - core, rank, everything, "copy") for rank in range(core, ranks)]
    halving: list[Step] = []
    distance = core // 2
    while distance:
        # A rank keeps the chunks whose leading bits equal its own and sends its partner's half.
        halving.append([_exchange(rank, distance, core, "add") for rank in range(core)])
        distance //= 2
    doubling: list[Step] = [[Transfer(one.target, one.source, one.chunks, "copy") for one in step] for step in reversed(halving)]
    steps = [before, *halving, *doubling, after] if before else halving + doubling
    return Algorithm("halving_doubling", ranks, core, steps)


def _exchange(rank: int, distance: int, core: int, action: Literal["copy", "add"]) -> Transfer:
    partner = rank ^ distance
    chunks = tuple(chunk for chunk in range(core) if chunk // distance == partner // distance)
    return Transfer(rank, partner, chunks, action)


def pairwise(ranks: int) -> Algorithm:
    """Pairwise all-to-all: in step k each rank sends to the k-th rank after it."""
    steps: list[Step] = [
        [Transfer(rank, (rank + distance) % ranks, (rank * ranks + (rank + distance) % ranks,), "copy") for rank in range(ranks)]
        for distance in range(1, ranks)
    ]
    return Algorithm("pairwise", ranks, ranks, steps)


def hierarchical(inside: int, domains: int) -> Algorithm:
    """Hierarchical all-reduce of rings: reduce-scatter in each domain, all-reduce of each shard between domains, all-gather in
    each domain."""
    shares = [tuple(range(share * domains, (share + 1) * domains)) for share in range(inside)]
    domain = [list(range(first, first + inside)) for first in range(0, inside * domains, inside)]
    scatter = together([reduce_scatter(members, shares) for members in domain])
    between = []
    for i in range(inside):
        peers, chunks = [members[i] for members in domain], [(chunk,) for chunk in shares[(i + 1) % inside]]
        between.append(reduce_scatter(peers, chunks) + all_gather(peers, chunks))
    gather = together([all_gather(members, shares) for members in domain])
    return Algorithm("hierarchical", inside * domains, inside * domains, scatter + together(between) + gather)


def together(parts: Iterable[list[Step]]) -> list[Step]:
    """Steps of several groups, merged to run concurrently."""
    return [[one for step in steps if step for one in step] for steps in zip_longest(*parts)]


BY_NAME: dict[str, Callable[[int], Algorithm]] = {
    "ring": ring,
    "tree": tree,
    "double_tree": double_tree,
    "nvls": nvls,
    "halving_doubling": halving_doubling,
    "pairwise": pairwise,
}
