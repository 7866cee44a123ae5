"""Phase and layer of each kernel or operator of a training step."""

from bisect import bisect_right
from collections.abc import Iterator

from strata.platform.profile import work
from strata.platform.profile.trace import Event, Trace, walk
from strata.platform.profile.work import Work

PHASES = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint")


def works(trace: Trace) -> list[Work]:
    """All work inside the profiled steps, in time order."""
    steps = trace.steps()
    return work.works(trace, Phases(trace), steps[0].begin, steps[-1].end) if steps else []


class Phases:
    """Phase and layer of an event. The backward pass of a layer runs autograd nodes that its forward pass made."""

    def __init__(self, trace: Trace) -> None:
        ranges = [e for root in trace.steps() for e in walk([root]) if e.range in PHASES]
        self._phases = [e for e in ranges if not any(outer.range in PHASES for outer in _outside(e))]
        self._begins = [e.begin for e in self._phases]
        self._layers: dict[int, str] = {}
        for root in trace.roots.get(trace.main, []):
            for event in walk([root]):
                if event.kind == "cpu_op" and event.sequence and "Backward" not in event.name and (layer := _layer_around(event)):
                    self._layers[event.sequence] = layer

    def phase(self, when: float) -> str:
        at = bisect_right(self._begins, when) - 1
        return self._phases[at].range or "" if at >= 0 and when < self._phases[at].end else "between phases"

    def layer(self, event: Event) -> str:
        for around in event.ancestors():
            if around.range and _is_layer(around.range):
                return around.range
            if around.sequence and "Backward" in around.name:
                return self._layers.get(around.sequence, "")
        return ""


def _outside(event: Event) -> Iterator[Event]:
    ancestors = event.ancestors()
    next(ancestors)
    return ancestors


def _is_layer(name: str) -> bool:
    return name.startswith("layer ") or name in ("head", "embedding")


def _layer_around(event: Event) -> str | None:
    return next((e.range for e in event.ancestors() if e.range and _is_layer(e.range)), None)
