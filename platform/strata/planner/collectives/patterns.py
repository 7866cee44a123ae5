"""Bytes and hops of each collective algorithm, as formulas over the placement of its ranks.

`algorithms.py` has the same algorithms step by step; a test compares the bytes of the two.
"""

from dataclasses import dataclass
from typing import Literal

from strata.planner.collectives import nccl
from strata.planner.collectives.congestion import Traffic

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Algorithm = Literal["ring", "tree", "double_tree", "nvls", "nvls_tree", "pat", "chain", "pairwise", "direct"]


@dataclass(frozen=True)
class Place:
    """Placement of a group's ranks: `inside` ranks in each of `domains` NVLink domains.

    `shared` groups use a domain's network cards concurrently (8 for data parallelism over nodes of 8 tensor-parallel ranks). For
    a send, `domains` is the largest distance between the two ranks, in domains; 1 means the same domain.
    """

    inside: int
    domains: int = 1
    shared: int = 1

    @property
    def ranks(self) -> int:
        return self.inside * self.domains


@dataclass(frozen=True)
class Pattern:
    """One algorithm for one kind of collective.

    Formulas over `ranks`, `inside`, `domains` and `leaving` (1 with several domains, 0 with one): bytes sent by the busiest rank
    per byte of the buffer, and sequential hops.
    """

    algorithm: Algorithm
    inside: str
    outside: str
    hops_inside: str
    hops_outside: str
    family: str  # key of its latencies in nccl.py
    why: str


_RING = "many rings, each leaving a domain once, through a different rank and card"
_TREE = "a chain inside the domain (as NCCL builds it), a tree between domains"
_ONE_WAY = (  # half of an all-reduce
    Pattern(
        "ring",
        "(ranks - 1) / ranks * (inside - leaving) / inside",
        "(ranks - 1) / ranks * leaving / inside",
        "ranks - domains",
        "domains - 1",
        "ring",
        _RING,
    ),
    Pattern(
        "pat",
        "0",
        "(ranks - 1) / ranks",
        "0",
        "ceil(log2(domains))",
        "pat",
        "a tree from every rank, concurrently; NCCL supports it for one rank per domain",
    ),
)
PATTERNS: dict[Kind, tuple[Pattern, ...]] = {
    "all_reduce": (
        Pattern(
            "ring",
            "2 * (ranks - 1) / ranks * (inside - leaving) / inside",
            "2 * (ranks - 1) / ranks * leaving / inside",
            "2 * (ranks - domains)",
            "2 * (domains - 1)",
            "ring",
            _RING,
        ),
        Pattern(
            "double_tree",
            "min(inside - 1, 2)",
            "leaving * min(domains, 4) / 2 / inside",  # half the buffer in each tree; inner nodes of one are leaves of the other
            "2 * (inside - 1)",
            "2 * ceil(log2(domains))",
            "tree",
            _TREE + ", and a second tree for the other half of the buffer, with the leaves of the first as inner nodes",
        ),
        Pattern(
            "tree",
            "min(inside - 1, 2)",
            "min(domains - 1, 3) / inside",  # up once, down twice
            "2 * (inside - 1)",
            "2 * ceil(log2(domains))",
            "tree",
            _TREE,
        ),
        Pattern(
            "nvls",
            "(ranks + 1) / ranks",  # the whole buffer up, and a rank's shard of the sums once more, which the switch multicasts
            "0",
            "1",
            "0",
            "nvls",
            "the switch reduces while it reads from all ranks, and multicasts the result",
        ),
        Pattern(
            "nvls_tree",
            "(inside + 1) / inside",
            "min(domains, 4) / 2 / inside",
            "1",
            "2 * ceil(log2(domains))",
            "nvls",
            "in-switch reduction inside the domain, a double tree per rank between domains",
        ),
    ),
    "all_gather": _ONE_WAY,
    "reduce_scatter": _ONE_WAY,
    "broadcast": (
        Pattern(
            "chain",
            "(inside - leaving) / inside",
            "leaving / inside",
            "ranks - domains",
            "domains - 1",
            "ring",
            "forwarded chunk by chunk",
        ),
    ),
    "all_to_all": (
        Pattern(
            "pairwise",
            "(inside - 1) / ranks",
            "(ranks - inside) / ranks",
            f"ceil((inside - 1) / {nccl.CONCURRENT_PEERS})",
            f"ceil((ranks - inside) / {nccl.CONCURRENT_PEERS})",
            "ring",
            "every rank to every other, 8 at a time",
        ),
    ),
    "send": (Pattern("direct", "1 - leaving", "leaving", "1 - leaving", "leaving", "ring", "one rank to another"),),
}
# Distance of the traffic that leaves a domain.
TRAFFIC: dict[Kind, Traffic] = {
    "all_reduce": "neighbours",
    "all_gather": "neighbours",
    "reduce_scatter": "neighbours",
    "broadcast": "neighbours",
    "all_to_all": "everyone",
    "send": "far",
}
