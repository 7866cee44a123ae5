"""Phases of an engine's start, from the timestamps in vLLM's log. They have a resolution of one second."""

import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

STAMP = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d) \[")
ROLE = re.compile(r"^:actor_name:ServeReplica:.*?(\w+)$", re.MULTILINE)
# Phases in their order, each with the messages that end it. An engine without graphs has no message of that phase, for example;
# its time is then part of the next phase.
ENDS = {
    "imports": "Initializing a V1 LLM engine",
    "weights": "Model loading took|Loading weights took",
    "compile": "torch.compile .*took|Initial profiling/warmup run took|Directly load",
    "KV cache size": "GPU KV cache size",  # measured, with a trial capture of graphs, or recorded
    "graphs": "Graph capturing finished",
    "warm-up": r"init engine \(",
}
LAST = "first answer"


def of(log: str, began: datetime, answered: datetime) -> dict[str, float]:
    """Seconds of each phase from `began`, the start of the command, to `answered`. Empty if no engine wrote to this log."""
    times = [(when, line) for line in log.splitlines() if (when := _when(line, began)) is not None]
    found: dict[str, float] = {}
    last = began
    for phase, messages in ENDS.items():
        ends = [when for when, line in times if when >= last - timedelta(seconds=1) and re.search(messages, line)]
        if ends:
            found[phase] = max(0.0, (max(ends) - last).total_seconds())
            last = max(last, *ends)
        elif phase == "imports":
            return {}
    return found | {LAST: (answered - last).total_seconds()}


def _when(line: str, began: datetime) -> datetime | None:
    stamp = STAMP.search(line)
    return datetime.strptime(f"{began.year}-{stamp[1]}", "%Y-%m-%d %H:%M:%S") if stamp else None


def of_engines(logs: Iterable[Path], began: datetime, answered: datetime) -> dict[str, dict[str, float]]:
    """The phases of every engine that wrote one of the logs, by its role."""
    found: dict[str, dict[str, float]] = {}
    for path in sorted(logs):
        log = path.read_text(errors="replace")
        if phases := of(log, began, answered):
            role = named[1] if (named := ROLE.search(log)) else "engine"
            found[role if role not in found else f"{role} {len(found) + 1}"] = phases
    return found
