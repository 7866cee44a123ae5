"""Cause of a hang: a pure function of the evidence of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from strata.training.watchdog import collectives
from strata.training.watchdog.collectives import Stuck
from strata.training.watchdog.evidence import BUSY, Evidence

Kind = Literal[
    "process stopped",
    "process died",
    "error raised",
    "node silent",
    "data loading stuck",
    "checkpoint stuck",
    "file access stuck",
    "waiting for a lock",
    "busy in Python",
    "busy outside Python",
    "ended early",
    "collective skipped or out of order",
    "collective of other sizes",
    "different collective",
    "connection lost",
    "GPU stuck",
    "blocked",
    "replica differs",
    "batch left out",
]
PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
FILE_CALLS = {0, 1, 2, 17, 18, 19, 20, 74, 75, 257}  # read, write, open, p{read,write}{,v}, f{,data}sync, openat on x86-64
LOCK_CALLS = {202}  # futex


@dataclass(frozen=True)
class Diagnosis:
    kind: Kind
    ranks: tuple[int, ...]  # at fault
    sentence: str
    stuck: Stuck | None = None


def dead(ranks: Sequence[Evidence]) -> Diagnosis | None:
    """The first rank that died or raised an error. Others fail after it because their peer is gone."""
    raised = [one for one in ranks if one.ended == "raised"]
    own = [one for one in raised if not any(text in (one.error or "") for text in PEER_GONE)]
    died = [one for one in ranks if one.gone and one.ended is None]
    if not own and not died:
        return None
    if named := next((one for one in own if one.blamed is not None), None):
        message = (named.error or "").partition(": ")[2]
        return Diagnosis("replica differs" if named.blamed else "batch left out", named.blamed or (), message)
    unfinished = collectives.stuck(ranks)
    for stuck in unfinished:
        if stuck.deviating:
            return _deviation(stuck)
    if aborted := [one for one in died if one.fatal == "Aborted" and one.in_torch_distributed]:
        return _abort(aborted, ranks, _first(unfinished))
    if died and (not own or min(one.seen_at for one in died) < min(one.ended_at for one in own)):
        first = min(died, key=lambda one: one.seen_at)
        sentence = f"{_who(first)} died without an error: SIGKILL, often by the kernel when memory is short."
        return Diagnosis("process died", (first.rank,), sentence)
    first = min(own, key=lambda one: one.ended_at)
    return Diagnosis("error raised", (first.rank,), f"{_who(first)} raised {first.error}")


def hang(ranks: Sequence[Evidence], silent: Sequence[int] = ()) -> Diagnosis:
    """Cause of no progress. `silent`: ranks whose sentinel does not report, although it needs nothing of the worker."""
    unfinished = collectives.stuck(ranks)
    if lost := [one for one in ranks if one.rank in silent]:
        sentence = f"Nothing is heard from {_all(lost)}: the node is gone, or its connection to the storage."
        return Diagnosis("node silent", _numbers(lost), sentence, _first(unfinished))
    if stopped := [one for one in ranks if one.state in "Tt"]:
        sentence = f"{_all(stopped)} is stopped (SIGSTOP or a debugger).{_missing(stopped[0], _first(unfinished))}"
        return Diagnosis("process stopped", _numbers(stopped), sentence, _first(unfinished))
    for stuck in unfinished:
        if stuck.deviating:
            return _deviation(stuck)
    alive = [one for one in ranks if one.ended is None]
    if ended := [one for one in ranks if one.ended is not None]:
        sentence = f"{_all(ended)} has ended while {_all(alive)} still waits for it."
        return Diagnosis("ended early", _numbers(ended), sentence, _first(unfinished))
    if late := [one for one in ranks if not one.waits]:
        worst = late[0]
        kind, state = _own_cause(worst)
        first = _first(unfinished)
        sentence = f"{_all(late)} {state} in the phase '{worst.phase}', at {worst.line}.{_missing(worst, first)}"
        return Diagnosis(kind, _numbers(late), sentence, first)
    return _connection(ranks, _first(unfinished))


def _first(unfinished: Sequence[Stuck]) -> Stuck | None:
    return unfinished[0] if unfinished else None


def _missing(one: Evidence, stuck: Stuck | None) -> str:
    return f" It is missing in {stuck.collective} of group {stuck.group}." if stuck and one.rank in stuck.missing else ""


def _deviation(stuck: Stuck) -> Diagnosis:
    rank, other = next(iter(stuck.deviating.items()))
    expected, ranks = stuck.collective, tuple(stuck.deviating)
    found = f"Rank {rank} runs {other} of group {stuck.group}, where the other ranks run {expected.op} of {expected.sizes}"
    if other.signature in stuck.followed_by:
        return Diagnosis("collective skipped or out of order", ranks, f"{found}: it skipped that one, or runs it later.", stuck)
    if other.op == expected.op:
        return Diagnosis("collective of other sizes", ranks, f"{found}: the sizes differ.", stuck)
    return Diagnosis("different collective", ranks, f"{found}.", stuck)


def _abort(aborted: Sequence[Evidence], ranks: Sequence[Evidence], stuck: Stuck | None) -> Diagnosis:
    """gloo aborts a process that receives more data than it expects. That process is the one at fault only if the others were in
    their usual collective."""
    if unusual := collectives.unusual(ranks):
        rank, other = next(iter(unusual.items()))
        sentence = (
            f"Rank {rank} runs {other}, which does not follow the collectives before it; {_all(aborted)} aborted because of that."
        )
        return Diagnosis("collective of other sizes", tuple(unusual), sentence, stuck)
    where = f", while others were in {stuck.collective}" if stuck else ""
    sentence = f"{_all(aborted)} aborted in a collective of other sizes, at {aborted[0].line}{where}."
    return Diagnosis("collective of other sizes", _numbers(aborted), sentence, stuck)


def _own_cause(one: Evidence) -> tuple[Kind, str]:
    """Cause within a rank that is in no collective."""
    if one.mute:
        return "busy outside Python", "holds the GIL and does not return to Python"
    if one.phase == "data" and one.thread_cpu < BUSY:
        return "data loading stuck", "waits for data"
    if one.phase == "checkpoint" and one.thread_cpu < BUSY:
        return "checkpoint stuck", "waits for the storage of a checkpoint"
    if one.thread_cpu >= BUSY:
        return "busy in Python", "computes without end"
    if one.state == "D" or one.syscall in FILE_CALLS:
        return "file access stuck", "waits for a file"
    if one.gpu is not None and any("/cuda/" in frame for frame in one.stack[:3]):
        return "GPU stuck", "waits for its GPU"
    if one.syscall in LOCK_CALLS:
        return "waiting for a lock", "waits for a lock"
    return "blocked", "is blocked"


def _connection(ranks: Sequence[Evidence], stuck: Stuck | None) -> Diagnosis:
    """All ranks are in the same collective. Data that was sent and not read, or not acknowledged, shows where it ends. On GPUs, a
    collective that only some of them have begun shows a GPU that never came to it."""
    idle = [one for one in ranks if one.gpu is not None and _states(one) == {"scheduled"}]
    if idle and len(idle) < len(ranks):
        return Diagnosis("GPU stuck", _numbers(idle), f"The GPU of {_all(idle)} has not begun the collective.", stuck)
    owners = {end.local: one.rank for one in ranks for end in one.connections}
    trouble: dict[int, int] = {}
    for one in ranks:
        for end in one.connections:
            if end.remote not in owners:
                continue  # a connection to Ray
            if end.unread:
                trouble[one.rank] = trouble.get(one.rank, 0) + 2
            if end.retransmissions:
                for rank in (one.rank, owners[end.remote]):
                    trouble[rank] = trouble.get(rank, 0) + 1
    most = max(trouble.values(), default=0)
    worst = [one for one in ranks if most and trouble.get(one.rank, 0) == most]
    where = f" in {stuck.collective} of group {stuck.group}" if stuck else ""
    if worst:
        sentence = f"All ranks wait{where}. Data of other ranks does not pass {_all(worst)}: a lost connection or network card."
        return Diagnosis("connection lost", _numbers(worst), sentence, stuck)
    sentence = f"All ranks wait{where}, and no connection shows lost data: the network between them is the likely cause."
    return Diagnosis("connection lost", _numbers(ranks), sentence, stuck)


def _states(one: Evidence) -> set[str]:
    return {op.state for ops in one.groups.values() for op in ops if not op.retired}


def _numbers(ranks: Sequence[Evidence]) -> tuple[int, ...]:
    return tuple(one.rank for one in ranks)


def _who(one: Evidence) -> str:
    gpu = f", GPU {one.gpu}" if one.gpu else ""
    return f"Rank {one.rank} (process {one.pid} on {one.host}{gpu})"


def _all(ranks: Sequence[Evidence]) -> str:
    return ", ".join(map(_who, ranks))
