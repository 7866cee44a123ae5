"""Comparison of the ranks' collectives: the first one that is not finished, and the ranks that miss it or run another."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strata.training.watchdog.evidence import Evidence
from strata.training.watchdog.flight import Collective

CONTEXT = 3  # earlier collectives by which a place in the pattern of a step is found again


@dataclass(frozen=True)
class Stuck:
    """The first unfinished collective of a group."""

    group: str
    collective: Collective  # as most of its ranks run it
    missing: tuple[int, ...]  # ranks of the group that have not begun it
    deviating: dict[int, Collective]  # ranks that run another one in its place
    followed_by: frozenset[tuple[str, str]]  # signatures of collectives that followed it in earlier steps


def stuck(ranks: Sequence[Evidence]) -> list[Stuck]:
    """Unfinished collectives by group, the one with the most waiting ranks first."""
    members: dict[str, dict[int, dict[int, Collective]]] = {}
    for one in ranks:
        for group, ops in one.groups.items():
            members.setdefault(group, {})[one.rank] = {op.seq: op for op in ops}
    found = []
    for group, by_rank in members.items():
        waiting = [seq for ops in by_rank.values() for seq, op in ops.items() if not op.retired]
        if not waiting:
            continue
        seq = min(waiting)
        running = {rank: ops[seq] for rank, ops in by_rank.items() if seq in ops}
        behind = {rank for rank, ops in by_rank.items() if max(ops, default=0) < seq}
        # A stopped or dead rank has published no collectives. Only of the default group all ranks are members for sure.
        mute = {one.rank for one in ranks if not one.groups} if group.endswith(":default_pg") else set()
        missing = tuple(sorted(behind | mute))
        expected = _expected(running, by_rank, seq)
        deviating = {rank: op for rank, op in running.items() if op.signature != expected.signature}
        found.append((len(running), Stuck(group, expected, missing, deviating, _followers(by_rank, seq, expected))))
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]


def unusual(ranks: Sequence[Evidence]) -> dict[int, Collective]:
    """Ranks whose unfinished collective did not follow the same ones in earlier steps."""
    found = {}
    for one in ranks:
        for ops in one.groups.values():
            by_seq = {op.seq: op for op in ops}
            unfinished = min((op for op in ops if not op.retired), key=lambda op: op.seq, default=None)
            usual = _usual({one.rank: by_seq}, unfinished.seq) if unfinished else set()
            if unfinished and usual and unfinished.signature not in usual:
                found[one.rank] = unfinished
    return found


def _expected(running: dict[int, Collective], by_rank: dict[int, dict[int, Collective]], seq: int) -> Collective:
    """The collective of most ranks. With as many for one as for another, the one that came here in earlier steps."""
    counts = Counter(op.signature for op in running.values()).most_common()
    best = {signature for signature, count in counts if count == counts[0][1]}
    if len(best) > 1 and (usual := _usual(by_rank, seq) & best):
        best = usual
    unfinished = [op for op in running.values() if op.signature in best and not op.retired]
    return next(iter(unfinished), next(op for op in running.values() if op.signature in best))


def _usual(by_rank: dict[int, dict[int, Collective]], seq: int) -> set[tuple[str, str]]:
    """Signatures that followed the same few collectives earlier."""
    found: set[tuple[str, str]] = set()
    for ops in by_rank.values():
        context = _signatures(ops, seq - CONTEXT, CONTEXT)
        earlier = (at for at in ops if at < seq and _signatures(ops, at - CONTEXT, CONTEXT) == context)
        found |= {ops[at].signature for at in earlier if None not in context}
    return found


def _followers(by_rank: dict[int, dict[int, Collective]], seq: int, one: Collective) -> frozenset[tuple[str, str]]:
    pairs = (
        (ops[at].signature, ops[at + 1].signature) for ops in by_rank.values() for at in ops if at + 1 < seq and at + 1 in ops
    )
    return frozenset(after for before, after in pairs if before == one.signature)


def _signatures(ops: dict[int, Collective], first: int, count: int) -> list[tuple[str, str] | None]:
    return [ops[at].signature if at in ops else None for at in range(first, first + count)]
