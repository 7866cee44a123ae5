"""Rounds over the loads of a calibration."""

from types import SimpleNamespace
from typing import Any

import pytest

from strata.serving.bench.clients.load import Level, Target
from strata.serving.bench.clients.workloads import Workload
from strata.serving.calibration import figures, rounds
from strata.serving.calibration.figures import Figures
from strata.serving.calibration.loads import Load

UNIFORM = Workload("uniform", 64, 16, 8, 16, 0.0, 2)


def test_rate_of_an_open_loop_follows_the_speed_of_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others use is half as fast in the second round."""
    reached, sent = iter((40.0, 20.0, 20.0, 10.0, 30.0, 15.0)), []

    def run(target: Target, workload: Workload, level: Level, clients: int, seed: int) -> Any:
        sent.append((level, seed))
        return SimpleNamespace(records=[])

    monkeypatch.setattr(rounds.load, "run", run)
    monkeypatch.setattr(figures, "of", lambda _: Figures(next(reached), 100.0, 0.1, 0.2, 0.01, 0.01))
    loads = [Load("closed", UNIFORM, 24, concurrency=4), Load("open", UNIFORM, 24, share=0.5, of="closed")]
    closed, opened = rounds.measure(Target("host", 1, "m"), loads, 3, 1, 0, lambda _: None)
    assert [level.rate for level in opened.levels] == [20.0, 10.0, 15.0]
    assert [level.concurrency for level in closed.levels] == [4, 4, 4] and closed.figures.requests_per_s == 30.0
    assert list(zip(opened.levels, opened.seeds, strict=True)) == sent[1::2], "the simulation repeats each round"
