"""Removes from a trace the time in which its main thread waited for a processor that other processes used."""

from bisect import bisect_right
from collections import Counter

from strata.platform.profile.trace import Event, Trace, walk


def remove(trace: Trace) -> float:
    """Moves the events of the main thread, and returns the share of the steps' time that the thread could use. A GPU's trace
    stays as it is: its host only launches kernels."""
    if trace.on_gpu:
        return 1.0
    events = list(walk(trace.roots.get(trace.main, [])))
    knots = _knots(trace, events)
    steps = trace.steps()
    if not knots or not steps:
        return 1.0
    wall = steps[-1].end - steps[0].begin
    moments, delays = [at for at, _ in knots], [delay - knots[0][1] for _, delay in knots]
    for event in events:
        event.begin, event.end = (at - _delay(at, moments, delays) for at in (event.begin, event.end))
    return (steps[-1].end - steps[0].begin) / wall if wall else 1.0


def _knots(trace: Trace, events: list[Event]) -> list[tuple[float, float]]:
    """Moments at which the delay so far is known. Delays never shrink, whatever the order of two moments at the same time."""
    recorded: dict[str, list[list[float]]] = trace.facts.get("delays", {})
    seen: Counter[str] = Counter()
    knots = []
    for event in events:  # in the order of their beginnings
        name = event.range
        if name is None or name not in recorded or seen[name] >= len(recorded[name]):
            continue
        begin, end = recorded[name][seen[name]]
        seen[name] += 1
        knots += [(event.begin, begin), (event.end, end)]
    knots.sort()
    most, found = 0.0, []
    for at, delay in knots:
        most = max(most, delay)
        found.append((at, most))
    return found


def _delay(at: float, moments: list[float], delays: list[float]) -> float:
    """Delay up to a moment, evenly spread between two known ones."""
    after = bisect_right(moments, at)
    if after == 0:
        return delays[0]
    if after == len(moments):
        return delays[-1]
    length = moments[after] - moments[after - 1]
    part = (at - moments[after - 1]) / length if length else 1.0
    return delays[after - 1] + part * (delays[after] - delays[after - 1])
