"""Phases of an engine by vLLM's ranges: prefill steps, decode steps, mixed steps and sampling."""

import re
from bisect import bisect_right

from strata.platform.profile.trace import Event, Trace, walk

PHASES = ("prefill step", "decode step", "mixed step", "sampling", "empty step", "between steps")
STEP = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\(\d+\)")
RUNNER = "gpu_model_runner: "  # ranges of vLLM's first model runner, also on CPUs
SAMPLING = RUNNER + "sample"
TRANSFER = "kv transfer"  # Strata's range


def is_step(event: Event) -> bool:
    return STEP.match(event.name) is not None


def phase_of(event: Event) -> str | None:
    """Phase that a range begins, None for any other event. vLLM counts requests without a generated token as context; those with
    one token were prefilled by another engine, or have the rest of their prompt in the cache."""
    if match := STEP.match(event.name):
        requests, tokens, streams = int(match[1]), int(match[2]), int(match[3])
        if tokens > requests:
            return "mixed step" if streams else "prefill step"
        return "decode step" if requests + streams else "empty step"
    return "sampling" if event.name.startswith(SAMPLING) else None


class Phases:
    """Phase of a moment of the engine's loop. A runner of vLLM without ranges of its own samples outside of its steps."""

    def __init__(self, trace: Trace) -> None:
        main = list(walk(trace.roots.get(trace.main, [])))
        self.runner = [(event.begin, event.end) for event in main if event.name.startswith(RUNNER)]
        self._outside = "between steps" if self.runner else "sampling"
        self.ranges = [(event.begin, event.end, phase) for event in main if (phase := phase_of(event))]
        self._begins = [begin for begin, _, _ in self.ranges]

    def phase(self, when: float) -> str:
        at = bisect_right(self._begins, when) - 1
        return self.ranges[at][2] if at >= 0 and when < self.ranges[at][1] else self._outside

    def layer(self, event: Event) -> str:
        return ""
