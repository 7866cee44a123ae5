import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from strata.platform.ray_cluster import cluster
from strata.platform.recipe import Recipe
from strata.training import workers
from strata.training.interrupts import caught
from strata.training.loop import Job, Outcome
from strata.training.workers import run_workers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_asks_and_second_ends(number: int) -> None:
    asked: list[bool] = []
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), caught() as interrupts:
        interrupts.ask = lambda: asked.append(True)
        os.kill(os.getpid(), number)
        assert asked == [True] and interrupts.asked
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_ends_at_once_before_workers_run() -> None:
    with pytest.raises(KeyboardInterrupt), caught():
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_are_asked_to_stop_though_ray_takes_the_signal_for_itself(
    number: int, tmp_path: Path, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray does with SIGTERM when it connects. Its handler would end the command without a checkpoint."""
    asked: list[bool] = []
    job = Job(tmp_path, tmp_path, small_recipe.model, small_recipe.train, small_recipe.parallel)

    @contextmanager
    def connected(cpus: int) -> Iterator[bool]:
        signal.signal(number, lambda *_: pytest.fail("Ray's handler"))
        yield True

    def follow(*_: object) -> None:
        os.kill(os.getpid(), number)
        asked.append(job.stop.exists())

    monkeypatch.setattr(cluster, "connected", connected)
    monkeypatch.setattr(workers, "ClusterWatch", lambda _: SimpleNamespace(death=lambda: None, stop=lambda: None))
    monkeypatch.setattr(workers, "_require_gpus", lambda _: None)
    monkeypatch.setattr(workers, "Fit", lambda _: SimpleNamespace(start=lambda: None, outcome=lambda: Outcome(1, stopped=True)))
    monkeypatch.setattr(workers, "follow", follow)
    with caught() as interrupts:
        assert run_workers(job, interrupts, Console(quiet=True)).stopped
    assert asked == [True] and not job.stop.exists()
