"""Events of a trace that torch's profiler wrote, nested by thread. Needs no torch."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "strata:"  # of Strata's own ranges
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
DEVICE_MEMORY = 1  # of "Device Type"; 0 is the host's

Dims = Sequence[Any]


@dataclass(eq=False, slots=True)
class Event:
    """Work of a host thread or of a GPU stream. Times are in seconds; those of all ranks on a machine have the same origin."""

    name: str
    kind: str
    begin: float
    end: float
    thread: int
    dims: Dims = ()  # shapes of the inputs
    types: Sequence[str] = ()
    sequence: int | None = None  # number of the autograd node that this operation makes or runs
    correlation: int | None = None  # joins a kernel with its launch
    moved: int = 0  # bytes of a copy
    parent: "Event | None" = None
    children: list["Event"] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def range(self) -> str | None:
        """Name of a range of Strata's, None for any other event."""
        return self.name.removeprefix(PREFIX) if self.name.startswith(PREFIX) else None

    def ancestors(self) -> Iterator["Event"]:
        """This event and those around it, innermost first."""
        event: Event | None = self
        while event:
            yield event
            event = event.parent


def _is_step(event: Event) -> bool:
    return (event.range or "").startswith("step ")


@dataclass(frozen=True)
class Trace:
    """Trace of one rank or engine. `memory` has the allocated bytes after each change, of the GPU if there is one,
    else of the host."""

    rank: int
    facts: dict[str, Any]
    roots: dict[int, list[Event]]  # of host threads, in time order
    device: list[Event]  # kernels and copies, in time order
    launches: dict[int, Event]  # by correlation
    memory: list[tuple[float, int]]
    is_step: Callable[[Event], bool] = _is_step

    @property
    def main(self) -> int:
        """Thread of the loop that runs the steps."""
        return next((thread for thread, roots in self.roots.items() if any(self.is_step(root) for root in roots)), 0)

    def steps(self) -> list[Event]:
        """Ranges of the steps. In training, a step's range ends where the next one begins."""
        return [event for event in self.roots.get(self.main, []) if self.is_step(event)]

    @property
    def on_gpu(self) -> bool:
        return bool(self.device)


def walk(events: Sequence[Event]) -> Iterator[Event]:
    """Events and everything inside them, parents first."""
    stack = list(reversed(events))
    while stack:
        event = stack.pop()
        yield event
        stack.extend(reversed(event.children))


def read(folder: Path) -> list[Trace]:
    """Traces of all ranks of a profile."""
    found = []
    for path in sorted(folder.glob("rank*.trace.json.gz")):
        facts = json.loads(path.with_name(path.name.replace(".trace.json.gz", ".json")).read_text())
        with gzip.open(path) as file:
            found.append(parse(json.load(file), facts))
    return sorted(found, key=lambda trace: trace.rank)


def parse(document: dict[str, Any], facts: dict[str, Any], is_step: Callable[[Event], bool] = _is_step) -> Trace:
    host: dict[int, list[Event]] = defaultdict(list)
    device, memory = [], []
    gpu = any(raw.get("cat") in DEVICE for raw in document["traceEvents"])
    for raw in document["traceEvents"]:
        kind = raw.get("cat")
        if raw.get("ph") == "X" and kind in HOST and not raw["name"].startswith("ProfilerStep#"):
            event = _event(raw, kind)
            host[event.thread].append(event)
        elif raw.get("ph") == "X" and kind in DEVICE:
            device.append(_event(raw, kind))
        elif raw.get("name") == "[memory]" and raw["args"]["Device Type"] == (DEVICE_MEMORY if gpu else 0):
            memory.append((raw["ts"] / 1e6, int(raw["args"]["Total Allocated"])))
    roots = {thread: _nested(events) for thread, events in host.items()}
    launches = {e.correlation: e for events in host.values() for e in events if e.correlation is not None}
    return Trace(facts["rank"], facts, roots, sorted(device, key=lambda e: e.begin), launches, sorted(memory), is_step)


def _event(raw: dict[str, Any], kind: str) -> Event:
    args = raw.get("args", {})
    return Event(
        name=raw["name"],
        kind=kind,
        begin=raw["ts"] / 1e6,
        end=(raw["ts"] + raw["dur"]) / 1e6,  # one division: the end of a range is the beginning of the next
        thread=raw["tid"],
        dims=args.get("Input Dims", ()),
        types=args.get("Input type", ()),
        sequence=args.get("Sequence number"),
        correlation=args.get("correlation"),
        moved=args.get("bytes", 0),
    )


def _nested(events: list[Event]) -> list[Event]:
    """Outermost events of a thread, the others as children."""
    roots: list[Event] = []
    stack: list[Event] = []
    for event in sorted(events, key=lambda e: (e.begin, -e.end)):
        while stack and stack[-1].end <= event.begin:
            stack.pop()
        if stack:
            event.parent = stack[-1]
            stack[-1].children.append(event)
        else:
            roots.append(event)
        stack.append(event)
    return roots
