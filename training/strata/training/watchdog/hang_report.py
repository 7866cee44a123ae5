"""Hang report in the run's folder: `hangs/step-<N>.json` with all evidence, and the same as text for people."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strata.platform.files import write_atomic
from strata.training.watchdog.diagnosis import Diagnosis
from strata.training.watchdog.evidence import Evidence

ENDED = ("process died", "error raised", "replica differs", "batch left out")  # no hangs: Ray restarts the workers without a kill


def write(run: Path, ranks: Sequence[Evidence], found: Diagnosis, silent_s: float) -> Path:
    """Writes both files and returns the text's path. A later report of the same step has a number."""
    step = max((one.step for one in ranks), default=0)
    place, number = run / "hangs" / f"step-{step}", 1
    while place.with_suffix(".json").exists():
        number += 1
        place = run / "hangs" / f"step-{step}-{number}"
    stuck = found.stuck
    report = {
        "step": step,
        "kind": found.kind,
        "ranks": found.ranks,
        "sentence": found.sentence,
        "silent_s": round(silent_s, 1),
        "collective": None if stuck is None else {"group": stuck.group, **asdict(stuck.collective), "missing": stuck.missing},
        "evidence": [asdict(one) for one in ranks],
    }
    write_atomic(place.with_suffix(".json"), json.dumps(report, indent=1))
    write_atomic(place.with_suffix(".txt"), text(ranks, found, silent_s))
    return place.with_suffix(".txt")


def node_at_fault(ranks: Sequence[tuple[int, str]], at_fault: Sequence[int]) -> str | None:
    """The node of all ranks at fault. None if they are on several nodes, or if all ranks are suspect. `ranks` are all ranks with
    their nodes."""
    nodes = {node for rank, node in ranks if rank in at_fault}
    return next(iter(nodes)) or None if len(nodes) == 1 and len(at_fault) < len(ranks) else None


def caused_by(run: Path, node: str) -> list[str]:
    """Names of the reports of hangs that this node's ranks caused."""
    return sorted(path.stem for path in (run / "hangs").glob("*.json") if _node_of_hang(path) == node)


def _node_of_hang(path: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError):  # also reports of older versions, without nodes
        report: dict[str, Any] = json.loads(path.read_text())
        ranks = [(one["rank"], one["node"]) for one in report["evidence"]]
        return None if report["kind"] in ENDED else node_at_fault(ranks, report["ranks"])
    return None


def text(ranks: Sequence[Evidence], found: Diagnosis, silent_s: float) -> str:
    lines = [f"{found.kind}, {silent_s:.0f} s without progress", found.sentence, ""]
    for one in ranks:
        last = [f"{group}: {ops[-1]}{'' if ops[-1].retired else ', unfinished'}" for group, ops in one.groups.items() if ops]
        gpu = f", GPU {one.gpu}" if one.gpu else ""
        lines += [
            f"rank {one.rank} on {one.host}{gpu}, process {one.pid}: step {one.step}, phase {one.phase}, state {one.state},"
            f" {one.thread_cpu:.0%} of a core" + (f", {one.ended}: {one.error or 'no error'}" if one.ended else ""),
            *(f"    {each}" for each in last),
            *(f"    {frame}" for frame in one.stack),
        ]
    return "\n".join(lines) + "\n"
