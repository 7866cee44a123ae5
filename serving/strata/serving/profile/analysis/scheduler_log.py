"""Log of an engine's scheduler: its steps, and the requests in them. Times are in seconds on the clock of the engine's trace."""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strata.platform.profile import intervals
from strata.platform.profile.intervals import Interval


@dataclass
class Step:
    """One call of the scheduler. `tokens` are those of each request; an empty step runs no model."""

    begin: float
    end: float
    tokens: dict[str, int]
    waiting: int
    remote: int  # requests that wait for KV blocks of another engine
    kv: float  # share of the KV cache in use
    preempted: tuple[str, ...]
    delayed: float  # seconds that the engine's thread has waited for a processor, since its start
    update: Interval | None = None  # in which the scheduler reads the step's result


@dataclass
class Request:
    name: str
    prompt: int
    arrived: float
    steps: list[Step] = field(default_factory=list)
    finished: float | None = None

    @property
    def scheduled(self) -> float | None:
        return self.steps[0].begin if self.steps else None

    @property
    def prefilled(self) -> float | None:
        """End of the last step with more than one token, or of the first one if another engine prefilled."""
        several = [step for step in self.steps if step.tokens[self.name] > 1] or self.steps[:1]
        return several[-1].update[1] if several and several[-1].update else None


@dataclass(frozen=True)
class SchedulerLog:
    steps: tuple[Step, ...]
    requests: tuple[Request, ...]
    calls: tuple[Interval, ...]  # in which the scheduler runs

    def unfinished(self, end: float) -> list[Interval]:
        """Times in which the engine has a request."""
        return intervals.union((each.arrived, each.finished if each.finished is not None else end) for each in self.requests)

    def without_blocks(self, end: float) -> list[Interval]:
        """Times in which every request of the engine waits for KV blocks."""
        after = (*(step.begin for step in self.steps[1:]), end)
        return intervals.union(
            (step.begin, until)
            for step, until in zip(self.steps, after, strict=False)
            if not step.tokens and step.remote and step.remote == step.waiting
        )


def read(lines: Iterable[str], base_ns: int) -> SchedulerLog:
    """`base_ns`: Unix time of the trace's zero. A last line that is cut off is left out."""
    steps: list[Step] = []
    calls: list[Interval] = []
    requests: dict[str, Request] = {}
    finished: list[Request] = []
    open_steps: deque[Step] = deque()
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            break
        begin = (entry["begin"] - base_ns) / 1e9
        if "arrived" in entry:
            requests[entry["arrived"]] = Request(entry["arrived"], entry["prompt"], begin)
            continue
        end = (entry["end"] - base_ns) / 1e9
        calls.append((begin, end))
        if "scheduled" in entry:
            facts = (entry["scheduled"], entry["waiting"], entry["remote"], entry["kv"])
            step = Step(begin, end, *facts, tuple(entry["preempted"]), entry["delayed"])
            steps.append(step)
            if step.tokens:
                open_steps.append(step)
            for name in step.tokens:
                if name in requests:
                    requests[name].steps.append(step)
        elif "finished" in entry and open_steps:
            open_steps.popleft().update = (begin, end)
        for name in (*entry.get("finished", ()), *entry.get("cancelled", ())):
            if name in requests:
                done = requests.pop(name)
                done.finished = end
                finished.append(done)
    found: Sequence[Request] = [*finished, *requests.values()]
    return SchedulerLog(tuple(steps), tuple(sorted(found, key=lambda each: each.arrived)), tuple(calls))
