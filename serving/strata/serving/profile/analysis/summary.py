"""Time of each engine by cause. Every moment of the load has one cause; the causes of an engine add up to it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from strata.platform.profile import intervals, work
from strata.platform.profile.intervals import Interval
from strata.platform.profile.trace import Trace, walk
from strata.platform.profile.work import ATTENTION_PASSES, Work
from strata.serving.profile.analysis.phases import TRANSFER, Phases
from strata.serving.profile.analysis.scheduler_log import Request, SchedulerLog

WORKING = ("products", "attention", "KV cache", "sampling", "other work")
IDLE = (
    "collectives",
    "KV transfer",
    "waiting for requests",
    "waiting for other engines",
    "front end",
    "scheduler",
    "dispatch",
    "engine loop",
)
CAUSES = (*WORKING, *IDLE)
DISPATCH_S = 5e-6  # of an operator on a CPU: checks, allocation of the result, a view
COLLECTIVES = ("c10d::", "gloo:", "vllm::all_reduce", "vllm::all_gather", "vllm::reduce_scatter")


@dataclass(frozen=True)
class Engine:
    """An engine's trace, the log of its scheduler, and the time of the load on the clock of both."""

    name: str
    facts: dict[str, Any]
    trace: Trace
    log: SchedulerLog
    window: Interval
    client: tuple[Interval, ...]  # requests as their clients saw them


@dataclass(frozen=True)
class Phase:
    count: int
    seconds: float  # work on a GPU; on a CPU also the host between operators


@dataclass(frozen=True)
class EngineSummary:
    engine: Engine
    seconds: dict[str, float]  # by cause
    phases: dict[str, Phase]
    works: tuple[Work, ...]

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def role(self) -> str:
        return str(self.engine.facts["role"])

    @property
    def window(self) -> float:
        return self.engine.window[1] - self.engine.window[0]

    @property
    def busy(self) -> float:
        return sum(self.seconds[cause] for cause in WORKING)

    def count(self, phase: str) -> int:
        return self.phases[phase].count if phase in self.phases else 0

    def mean(self, phase: str) -> float:
        """Seconds of a phase; 0.0 if there was none."""
        return self.phases[phase].seconds / self.count(phase) if self.count(phase) else 0.0

    @property
    def requests(self) -> list[Request]:
        """Requests of the load, without those that warmed the engine up."""
        begin, end = self.engine.window
        return [each for each in self.engine.log.requests if begin <= each.arrived < end]

    @property
    def steps(self) -> int:
        begin, end = self.engine.window
        return sum(bool(step.tokens) and begin <= step.begin < end for step in self.engine.log.steps)

    @property
    def available(self) -> float:
        """Share of the time in which a processor was free for the engine's thread."""
        begin, end = self.engine.window
        delays = [step.delayed for step in self.engine.log.steps if begin <= step.begin < end]
        return 1.0 - (delays[-1] - delays[0]) / self.window if delays else 1.0

    @property
    def preemptions(self) -> int:
        begin, end = self.engine.window
        return sum(len(step.preempted) for step in self.engine.log.steps if begin <= step.begin < end)

    @property
    def queued(self) -> float:
        """Share of a request's time in the queue of the engine, mean over the requests, without waiting for KV blocks."""
        blocked, shares = self.engine.log.without_blocks(self.engine.window[1]), []
        for each in self.requests:
            if each.scheduled is not None and each.finished is not None:
                waits = intervals.difference([(each.arrived, each.scheduled)], blocked)
                shares.append(intervals.total(waits) / (each.finished - each.arrived))
        return mean(shares) if shares else 0.0


@dataclass(frozen=True)
class Summary:
    engines: tuple[EngineSummary, ...]

    @property
    def window(self) -> float:
        return self.engines[0].window


def summarize(engines: Sequence[Engine]) -> Summary:
    return Summary(tuple(_engine(each, [other for other in engines if other is not each]) for each in engines))


def _engine(engine: Engine, others: Sequence[Engine]) -> EngineSummary:
    phases, (begin, end) = Phases(engine.trace), engine.window
    found = [each for each in work.works(engine.trace, phases, begin, end) if each.kind != "collectives"]
    seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    until = begin
    for each in found:
        length = max(0.0, min(each.end, end) - max(each.begin, until))  # streams run side by side
        dispatch = 0.0 if engine.trace.on_gpu else min(DISPATCH_S, length)
        seconds[_cause(each)] += length - dispatch
        seconds["dispatch"] += dispatch
        until = max(until, each.end)
    idle = intervals.difference([engine.window], intervals.union((each.begin, each.end) for each in found))
    for cause, when in _idle_causes(engine, others, phases):
        seconds[cause] += intervals.total(intervals.intersection(idle, when))
        idle = intervals.difference(idle, when)
    seconds["engine loop"] = intervals.total(idle)
    return EngineSummary(engine, seconds, _phases(engine, phases, found), tuple(found))


def _cause(work: Work) -> str:
    if work.phase == "sampling":
        return "sampling"
    if work.kind == "matrix products":
        return "products"
    if work.kind in ATTENTION_PASSES:
        return "attention"
    return work.kind if work.kind in WORKING else "other work"


def _idle_causes(engine: Engine, others: Sequence[Engine], phases: Phases) -> list[tuple[str, list[Interval]]]:
    """Causes of idle time, the first that covers a moment wins."""
    events = [event for roots in engine.trace.roots.values() for event in walk(roots)]
    kernels = [(event.begin, event.end) for event in engine.trace.device if "nccl" in event.name.lower()]
    talk = [(event.begin, event.end) for event in events if event.name.startswith(COLLECTIVES)]
    transfers = [(event.begin, event.end) for event in events if event.range == TRANSFER]
    empty = intervals.difference([engine.window], engine.log.unfinished(engine.window[1]))
    in_flight = intervals.union(engine.client)
    elsewhere = intervals.union(
        (begin + shift, end + shift)
        for other in others
        for shift in [engine.window[0] - other.window[0]]
        for begin, end in other.log.unfinished(other.window[1])
    )
    return [
        ("collectives", intervals.union([*kernels, *talk])),
        ("waiting for requests", intervals.difference(empty, in_flight)),
        ("waiting for other engines", intervals.intersection(empty, elsewhere)),
        ("front end", empty),
        ("KV transfer", intervals.union([*transfers, *engine.log.without_blocks(engine.window[1])])),
        ("scheduler", intervals.union(engine.log.calls)),
        ("dispatch", intervals.union([*phases.runner, *((begin, end) for begin, end, _ in phases.ranges)])),
    ]


def _phases(engine: Engine, phases: Phases, found: Sequence[Work]) -> dict[str, Phase]:
    begin, end = engine.window
    lengths: dict[str, list[float]] = defaultdict(list)
    for first, last, name in phases.ranges:
        if begin <= first < end:
            lengths[name].append(last - first)
    if engine.trace.on_gpu:
        busy: dict[str, float] = defaultdict(float)
        for each in found:
            busy[each.phase] += each.seconds
        return {name: Phase(len(lengths.get(name, ())), seconds) for name, seconds in busy.items()}
    return {name: Phase(len(each), sum(each)) for name, each in lengths.items()}
