"""Faults planted in one of three ranks: each is named with its rank and its kind within 30 seconds."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from . import planted
from .planted import VICTIM, Fault

pytestmark = [pytest.mark.slow, pytest.mark.rotation]

LIMIT_S = 30.0
START_S = 120.0


@dataclass(frozen=True)
class Case:
    part: str
    fault: Fault | None
    kind: str
    early: bool = False
    collective: str | None = None


HANGS = {
    "stopped process": Case("data", planted.stop_process, "process stopped"),
    "stopped in a collective": Case("gather", planted.stop_process, "process stopped", collective="all_gather"),
    "killed process": Case("forward", planted.die, "process died"),
    "error in one rank": Case("forward", planted.fail, "error raised"),
    "data loader waits": Case("data", planted.wait_for_data, "data loading stuck", collective="all_reduce"),
    "data on a dead disk": Case("data", planted.read_fifo, "data loading stuck", collective="all_reduce"),
    "file read in the forward pass": Case("forward", planted.read_fifo, "file access stuck", collective="all_reduce"),
    "checkpoint on a dead disk": Case("checkpoint", planted.write_fifo, "checkpoint stuck", collective="all_reduce"),
    "endless Python loop": Case("forward", planted.loop_forever, "busy in Python", collective="all_reduce"),
    "GIL held": Case("forward", planted.hold_the_gil, "busy outside Python"),
    "lock taken twice": Case("forward", planted.lock_twice, "waiting for a lock", collective="all_reduce"),
    "deadlock of two threads": Case("forward", planted.deadlock, "waiting for a lock", collective="all_reduce"),
    "skipped collective": Case("reduce", planted.skip, "collective skipped or out of order", collective="all_reduce"),
    "swapped collectives": Case("reduce", planted.gather_first, "collective skipped or out of order", collective="all_reduce"),
    "smaller size": Case("reduce", planted.smaller, "collective of other sizes", collective="all_reduce"),
    "larger size": Case("reduce", planted.larger, "collective of other sizes", collective="all_reduce"),
    "other operation": Case("reduce", planted.other_op, "different collective", collective="all_reduce"),
    "lost connections": Case("reduce", planted.lose_connections, "connection lost", collective="all_reduce"),
    "ended early": Case("data", None, "ended early", early=True, collective="all_reduce"),
    "lost node": Case("data", planted.lose_node, "node silent"),
}


@pytest.mark.parametrize("case", HANGS.values(), ids=HANGS.keys())
def test_hang_is_named(case: Case, tmp_path: Path) -> None:
    watch = planted.watch(tmp_path)
    with planted.ranks(tmp_path, case.part, case.fault, case.early):
        news, took = news_after_the_fault(tmp_path, watch)
        report = json.loads(next((tmp_path / "hangs").glob("*.json")).read_text())
    assert (report["kind"], report["ranks"]) == (case.kind, [VICTIM]), f"{news}\n{report}"
    assert took < LIMIT_S and f"ank {VICTIM} " in news[0]
    if case.collective:
        assert report["collective"]["op"] == case.collective and report["collective"]["seq"] > planted.AT
    lines = {one["rank"]: one["stack"][0] for one in report["evidence"]}
    assert len(lines) == planted.WORLD and all(":" in line for line in lines.values())
    if case.fault and case.kind not in ("process died", "node silent", "process stopped"):
        frames = [frame for one in report["evidence"] if one["rank"] == VICTIM for frame in one["stack"]]
        assert any(case.fault.__name__ in frame for frame in frames) or case.fault is planted.skip


@pytest.mark.parametrize("fault", [planted.sleep_a_little, planted.compute_more])
def test_slow_rank_is_named(fault: Fault, tmp_path: Path) -> None:
    """All ranks take as long for a step, so only the rank's own time shows it."""
    watch = planted.watch(tmp_path)
    with planted.ranks(tmp_path, "forward", fault):
        news, took = news_after_the_fault(tmp_path, watch)
    assert len(news) == 1 and news[0].startswith(f"Rank {VICTIM} ") and "is slow since step" in news[0], news
    assert took < LIMIT_S and not (tmp_path / "hangs").exists()


def news_after_the_fault(run: Path, watch: Any) -> tuple[list[str], float]:
    """First sentences of the watch, and the seconds from the fault to them. The watch reports nothing before the fault."""
    start = time.monotonic()
    while not (run / "planted").exists():
        assert watch.news() == [] and time.monotonic() - start < START_S
        time.sleep(0.25)
    while not (news := watch.news()):
        assert time.monotonic() - start < START_S + LIMIT_S
        time.sleep(0.25)
    return news, time.monotonic() - float((run / "planted").read_text())
