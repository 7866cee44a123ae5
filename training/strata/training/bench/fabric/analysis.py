"""Names slow nodes and slow paths in measured times. No processes, no torch.

A collective is as slow as its slowest member, so an all-reduce over all nodes does not show the cause. Pairs do: a node is slow
if even the fastest of its pairs is slow, while its partners are fast with others. Two nodes have a single pair, which does not
tell them apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Exchange:
    """All-reduce between two ranks on different nodes."""

    ranks: tuple[int, int]
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """Seconds of all-reduces on a cluster. `nodes` is the node of each rank. `size` is the buffer, in bytes, of the exchanges and
    of `inside`, the all-reduces within each node; `world` are those over all ranks, by size."""

    nodes: tuple[str, ...]
    size: int
    inside: Mapping[str, float]
    exchanges: Sequence[Exchange]
    world: Mapping[int, float]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(self.nodes))


@dataclass(frozen=True)
class Verdict:
    """Bandwidth of a node in bytes per second, and its share of the median of the other nodes. None: not measured. `ranks` are
    those that are slow to other nodes."""

    node: str
    inside: float | None
    inside_share: float | None
    between: float | None
    between_share: float | None
    ranks: tuple[int, ...]
    slow: bool


@dataclass(frozen=True)
class Path:
    """Connection between two nodes that is slower than others, although both nodes are not slow."""

    nodes: tuple[str, str]
    ranks: tuple[int, int]
    share: float  # of the median of all connections


def verdicts(measured: Measurement, least: float) -> list[Verdict]:
    """A node is slow below `least` of the median of the others. The rate of a node is that of its slowest rank, which the other
    ranks wait for."""
    best = _best_rates(measured)
    between = {
        name: min(best[rank] for rank, node in enumerate(measured.nodes) if node == name and rank in best)
        for name in measured.names
        if any(node == name and rank in best for rank, node in enumerate(measured.nodes))
    }
    inside = {name: _rate(measured, seconds, measured.nodes.count(name)) for name, seconds in measured.inside.items()}
    inside_shares, between_shares = _shares(inside), _shares(between)
    found = []
    for name in measured.names:
        shares = [share for share in (inside_shares.get(name), between_shares.get(name)) if share is not None]
        usual = [rate for rank, rate in best.items() if measured.nodes[rank] != name]
        slow_ranks = [
            rank for rank, rate in best.items() if measured.nodes[rank] == name and usual and rate < least * median(usual)
        ]
        found.append(
            Verdict(
                name,
                inside.get(name),
                inside_shares.get(name),
                between.get(name),
                between_shares.get(name),
                tuple(slow_ranks),
                any(share < least for share in shares),
            )
        )
    return found


def slow_paths(measured: Measurement, found: Sequence[Verdict], least: float) -> list[Path]:
    slow = {one.node for one in found if one.slow}
    if len(measured.exchanges) < 2:
        return []
    usual = median(measured.size / one.seconds for one in measured.exchanges)
    paths = []
    for one in measured.exchanges:
        nodes = measured.nodes[one.ranks[0]], measured.nodes[one.ranks[1]]
        share = measured.size / one.seconds / usual
        if share < least and not slow & set(nodes):
            paths.append(Path(nodes, one.ranks, share))
    return sorted(paths, key=lambda path: path.share)


def _best_rates(measured: Measurement) -> dict[int, float]:
    """Rate of each rank with its fastest partner. An all-reduce of two ranks sends the buffer once in each direction."""
    best: dict[int, float] = {}
    for one in measured.exchanges:
        for rank in one.ranks:
            best[rank] = max(best.get(rank, 0.0), measured.size / one.seconds)
    return dict(sorted(best.items()))


def _rate(measured: Measurement, seconds: float, ranks: int) -> float:
    """NCCL's bus bandwidth of an all-reduce."""
    return measured.size * 2 * (ranks - 1) / ranks / seconds


def _shares(rates: Mapping[str, float]) -> dict[str, float]:
    """Share of the median of the others, for each node; none with a single node."""
    if len(rates) < 2:
        return {}
    return {name: rate / median(other for node, other in rates.items() if node != name) for name, rate in rates.items()}
