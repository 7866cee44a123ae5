"""Reports of all ranks as the driver reads them."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.training.watchdog.flight import Collective

BUSY = 0.1  # cores of a training thread that computes, on a machine that others use too
FATAL = re.compile(r"Fatal Python error: (.+)")
DUMPED = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


@dataclass(frozen=True)
class Connection:
    """One end of a TCP connection."""

    local: str
    remote: str
    unacknowledged: int
    unread: int
    retransmissions: int


@dataclass(frozen=True)
class Evidence:
    """One rank: its own last words, and its process as the kernel shows it."""

    session: str
    rank: int
    world: int
    host: str
    gpu: str | None
    pid: int
    step: int
    phase: str
    marks: int
    own_s: tuple[float, ...]
    stack: tuple[str, ...]  # innermost first
    groups: dict[str, tuple[Collective, ...]] = field(default_factory=dict)
    ended: str | None = None  # finished or raised
    error: str | None = None
    blamed: tuple[int, ...] | None = None  # ranks that its error names
    fatal: str | None = None  # signal that ended the process, such as Aborted
    ended_at: float = 0.0
    gone: bool = False
    seen_at: float = 0.0
    beat: float = 0.0
    state: str = "?"  # of the process, as in ps: R, S, D, T, t
    thread_cpu: float = 0.0  # cores that the training thread used
    cpu: float = 0.0
    io: float = 0.0  # bytes read and written per second
    syscall: int | None = None
    connections: tuple[Connection, ...] = ()
    node: str = ""  # id of the Ray node

    @property
    def line(self) -> str:
        """Innermost line outside of torch: the call that does not return."""
        return next((frame for frame in self.stack if "/torch/" not in frame), "no Python line")

    @property
    def waits(self) -> bool:
        """True inside a collective, or a receive, which the flight recorder of gloo lacks. A thread that computes, with an
        asynchronous collective in flight, does not wait for it."""
        unfinished = any(not op.retired for ops in self.groups.values() for op in ops)
        return self.in_torch_distributed or (unfinished and (self.gpu is not None or self.thread_cpu < BUSY))

    @property
    def in_torch_distributed(self) -> bool:
        return bool(self.stack) and any("/torch/distributed/" in frame for frame in self.stack[:3])

    @property
    def mute(self) -> bool:
        """True if the process runs and its monitor thread does not: something holds the GIL."""
        return not self.gone and self.seen_at - self.beat > 4.0


def read(folder: Path) -> list[Evidence]:
    """The newest session's reports, by rank."""
    found: list[Evidence] = []
    for path in folder.glob("rank-*.json"):
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if raw["status"]:
            found.append(parse(raw["status"], raw["process"]))
    newest = max((one.session for one in found), default="")
    return sorted((one for one in found if one.session == newest), key=lambda one: one.rank)


def parse(status: dict[str, Any], process: dict[str, Any]) -> Evidence:
    stack = tuple(status["stack"])
    if dumped := _dumped(process.get("stacks", ""), status["thread"]):
        stack = dumped
    groups = {name: tuple(Collective(**op) for op in ops) for name, ops in status["groups"].items()}
    same = ("session", "rank", "world", "host", "gpu", "pid", "step", "phase", "marks", "ended", "beat")
    return Evidence(
        **{key: status[key] for key in same},
        own_s=tuple(status["own_s"]),
        stack=stack,
        groups=groups,
        error=status.get("error"),
        blamed=None if status.get("blamed") is None else tuple(status["blamed"]),
        fatal=next(iter(FATAL.findall(process.get("stacks", ""))), None),
        ended_at=status.get("ended_at", 0.0),
        gone=process["gone"],
        seen_at=process["at"],
        **{key: process[key] for key in ("state", "thread_cpu", "cpu", "io", "syscall") if key in process},
        node=status["node"],
        connections=tuple(Connection(*one) for one in process.get("sockets", [])),
    )


def _dumped(text: str, thread: str) -> tuple[str, ...]:
    """Frames of the training thread in the newest dump of all threads, in the form of `Evidence.stack`."""
    _, found, newest = text.rpartition(f"hread {thread}")  # Thread, or Current thread
    if not found:
        return ()
    lines = newest.split("\n\n")[0].splitlines()
    matches = [DUMPED.search(line) for line in lines]
    return tuple(f"{match['file']}:{match['line']} {match['name']}" for match in matches if match)
