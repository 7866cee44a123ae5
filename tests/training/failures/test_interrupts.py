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
def test_first_signal_requests_a_stop_and_second_ends(number: int) -> None:
    requests: list[bool] = []
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), caught() as interrupts:
        interrupts.request_stop = lambda: requests.append(True)
        os.kill(os.getpid(), number)
        assert requests == [True] and interrupts.stop_requested
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_signal_ends_the_command_before_workers_run() -> None:
    with pytest.raises(KeyboardInterrupt), caught():
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_is_requested_although_ray_installs_a_handler(
    number: int, tmp_path: Path, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray installs a SIGTERM handler when it connects, which would end the command without a checkpoint."""
    requests: list[bool] = []
    job = Job(tmp_path, tmp_path, small_recipe.model, small_recipe.train, small_recipe.parallel)

    @contextmanager
    def connected(cpus: int, least: int) -> Iterator[bool]:
        signal.signal(number, lambda *_: pytest.fail("Ray's handler"))
        yield True

    def follow(*_: object) -> None:
        os.kill(os.getpid(), number)
        requests.append(job.stop.exists())

    monkeypatch.setattr(cluster, "connected", connected)
    monkeypatch.setattr(workers, "ClusterWatch", lambda _: SimpleNamespace(death=lambda: None, stop=lambda: None))
    monkeypatch.setattr(workers, "_require_gpus", lambda _: None)
    stopped = SimpleNamespace(start=lambda: None, outcome=lambda: Outcome(1, stopped=True))
    monkeypatch.setattr(workers, "Fit", lambda *_, elastic: stopped)
    monkeypatch.setattr(workers, "follow", follow)
    with caught() as interrupts:
        assert run_workers(job, interrupts, Console(quiet=True)).stopped
    assert requests == [True] and not job.stop.exists()
