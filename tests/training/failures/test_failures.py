"""Random kills of workers, drivers and Ray's services: the run ends with the same losses as an undisturbed one."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from strata.platform.runs import Run
from strata.training.logs import attempts
from strata.training.metrics import records

from ..conftest import SMALL, strata_process

pytestmark = [pytest.mark.slow, pytest.mark.rotation]

STEPS = 240
# Kills of workers, and as many of drivers and of Ray services. Each takes half a minute, most of it for the restart.
KILLS = int(os.environ.get("STRATA_KILLS", "1"))
SERVICES = ("raylet", "gcs_server")
SETTINGS = (
    f"train.steps={STEPS}",
    "train.checkpoint_every=25",
    "train.eval_every=100",
    "train.max_failures=100",
    "parallel.workers=2",
)


def losses_of(run: Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records.read(run.metrics)]


def wait_until(condition: Callable[[], bool], timeout: float = 180) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def workers_of(driver: int) -> list[psutil.Process]:
    """Worker processes. Ray names them after the class that they run."""
    family = psutil.Process(driver).children(recursive=True)
    return [member for member in family if "RayTrainWorker" in " ".join(member.cmdline())]


def service_of(driver: int, name: str) -> psutil.Process:
    """Ray service. The driver starts its own cluster, so the services are its children."""
    return next(child for child in psutil.Process(driver).children() if child.name() == name)


def test_run_with_random_kills_ends_like_an_undisturbed_one(home: Path, corpus: Path) -> None:
    settings = [*SMALL, f"data.path={corpus}", *SETTINGS]
    undisturbed, disturbed = (Run(home / "runs" / name) for name in ("undisturbed", "disturbed"))
    process = strata_process(home, "train", "--run", undisturbed.name, *settings)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output

    seed = time.time_ns()
    chance = random.Random(seed)
    print("seed", seed)
    victims = ["worker", "driver", *chance.sample(SERVICES, 1)] * KILLS
    moments = sorted(chance.sample(range(5, STEPS - 40), len(victims)))
    chance.shuffle(victims)
    process = strata_process(home, "train", "--run", disturbed.name, *settings)
    starts = disturbed.path / "starts"  # written by starting workers, after they have truncated the history
    for moment, victim in zip(moments, victims, strict=True):
        wait_until(lambda moment=moment: (done := losses_of(disturbed)) != [] and done[-1][0] >= moment)
        killed = time.time()
        if victim == "worker":
            chance.choice(workers_of(process.pid)).kill()
        elif victim in SERVICES:
            service_of(process.pid, victim).kill()
        else:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            process = strata_process(home, "train", "--resume", disturbed.name)
        if victim != "gcs_server":  # restarted while the workers continue
            wait_until(lambda killed=killed: starts.exists() and starts.stat().st_mtime > killed)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "Traceback" not in output and "Raylet is terminated" not in output
    assert losses_of(disturbed) == losses_of(undisturbed)
    final = [records.read(run.metrics)[-1]["val_loss"] for run in (undisturbed, disturbed)]
    assert final[0] == final[1]
    # Each start has the logs of both workers, up to the end of the process, whatever ended it.
    found = attempts.every(attempts.folder(disturbed))
    assert len(found) > len(attempts.every(attempts.folder(undisturbed))) == 1
    logs = [log for folder in found.values() for log in folder.glob("rank-*.log")]
    assert len(logs) >= 4  # a start that failed early may have none
    for log in logs:
        wait_until(lambda log=log: "the process has ended" in log.read_text(), timeout=60)
