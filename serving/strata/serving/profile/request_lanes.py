"""Requests of an engine as events of its trace: each in a lane, from its arrival to its end, with its phases."""

from typing import Any

from strata.serving.profile.analysis.scheduler_log import Request, SchedulerLog

PROCESS = 1_000_000_000  # above all process ids


def lanes(log: SchedulerLog) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "strata: requests"}}]
    free: list[float] = []  # end of the last request in each lane
    for request in log.requests:
        if request.finished is None:
            continue
        lane = next((number for number, end in enumerate(free) if end <= request.arrived), len(free))
        free[lane:] = [request.finished, *free[lane + 1 :]]
        facts = {"request": request.name, "prompt": request.prompt, "steps": len(request.steps)}
        events.append(_event(request.name, lane, request.arrived, request.finished, facts))
        events += [_event(name, lane, begin, end, {}) for name, begin, end in spans(request)]
    return events


def spans(request: Request) -> list[tuple[str, float, float]]:
    """Phases of a finished request: waiting, prefill, decode."""
    if request.finished is None or request.scheduled is None:
        return []
    prefilled = request.prefilled if request.prefilled is not None else request.finished
    found = [("waiting", request.arrived, request.scheduled), ("prefill", request.scheduled, min(prefilled, request.finished))]
    return [*found, ("decode", prefilled, request.finished)] if prefilled < request.finished else found


def _event(name: str, lane: int, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    place = {"ph": "X", "cat": "strata_request", "pid": PROCESS, "tid": lane}
    return place | {"name": f"strata:{name}", "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": args}
