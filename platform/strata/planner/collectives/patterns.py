"""What each algorithm of a collective sends where, as formulas over the place of its ranks.

`algorithms.py` has the same algorithms step by step; a test holds the bytes of the two against each other.
"""

from dataclasses import dataclass
from typing import Literal

from strata.planner.collectives import nccl
from strata.planner.collectives.congestion import Traffic

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Algorithm = Literal["ring", "tree", "double_tree", "nvls", "nvls_tree", "pat", "chain", "pairwise", "direct"]


@dataclass(frozen=True)
class Place:
    """Where a group's ranks are: `inside` of them in each of `domains` NVLink domains, while `shared` such groups use a domain's
    network cards at the same time (8 for data parallelism over nodes of 8 tensor-parallel ranks). For a send, `domains` is how
    far the two may be apart, in domains; 1: the same one."""

    inside: int
    domains: int = 1
    shared: int = 1

    @property
    def ranks(self) -> int:
        return self.inside * self.domains


@dataclass(frozen=True)
class Pattern:
    """One algorithm for one kind. Formulas over `ranks`, `inside`, `domains` and `leaving` (1 where there are several domains, 0
    in one): bytes sent by the busiest rank per byte of the buffer, and hops that follow one another."""

    algorithm: Algorithm
    inside: str
    outside: str
    hops_inside: str
    hops_outside: str
    family: str  # whose latencies of nccl.py it has
    why: str


_RING = "many rings, each of which leaves a domain once, by another rank and card"
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
        "a tree from every rank, all at once; NCCL has it for one rank a domain",
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
            "leaving * min(domains, 4) / 2 / inside",  # half the buffer in each tree; who is busy in one is a leaf of the other
            "2 * (inside - 1)",
            "2 * ceil(log2(domains))",
            "tree",
            _TREE + ", and another for the other half of the buffer, with the first one's leaves on top",
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
            "(ranks + 1) / ranks",  # all of it up, and a rank's share of the sums once more, which the switch multiplies
            "0",
            "1",
            "0",
            "nvls",
            "the switch adds as it reads from all ranks, and writes to all at once",
        ),
        Pattern(
            "nvls_tree",
            "(inside + 1) / inside",
            "min(domains, 4) / 2 / inside",
            "1",
            "2 * ceil(log2(domains))",
            "nvls",
            "in-switch adding inside the domain, a double tree per rank between domains",
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
            "passed on chunk by chunk",
        ),
    ),
    "all_to_all": (
        Pattern(
            "pairwise",
            "(inside - 1) / ranks",
            "(ranks - inside) / ranks",
            f"ceil((inside - 1) / {nccl.PEERS_AT_ONCE})",
            f"ceil((ranks - inside) / {nccl.PEERS_AT_ONCE})",
            "ring",
            "every rank to every other, 8 at a time",
        ),
    ),
    "send": (Pattern("direct", "1 - leaving", "leaving", "1 - leaving", "leaving", "ring", "one rank to another"),),
}
# How far what leaves a domain goes.
TRAFFIC: dict[Kind, Traffic] = {
    "all_reduce": "neighbours",
    "all_gather": "neighbours",
    "reduce_scatter": "neighbours",
    "broadcast": "neighbours",
    "all_to_all": "everyone",
    "send": "far",
}
