"""A stopped worker of a real Ray run: named, killed and replaced, and the run ends with the losses of an undisturbed one."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from strata.platform.runs import Run
from strata.training.metrics import records

from ..conftest import SMALL, strata_process

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.long]

STEPS, STOP_AT = 60, 15
SETTINGS = (f"train.steps={STEPS}", "train.checkpoint_every=10", "train.eval_every=60", "parallel.workers=2")


def losses(run: Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records.read(run.metrics)]


def test_stopped_worker_is_named_and_replaced(home: Path, corpus: Path) -> None:
    settings = [*SMALL, f"data.path={corpus}", *SETTINGS]
    undisturbed, disturbed = (Run(home / "runs" / name) for name in ("undisturbed", "disturbed"))
    process = strata_process(home, "train", "--run", undisturbed.name, *settings)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0 and not (undisturbed.path / "hangs").exists(), output
    assert not (undisturbed.path / "watch").exists()

    process = strata_process(home, "train", "--run", disturbed.name, *settings)
    deadline = time.monotonic() + 400
    while not (done := losses(disturbed)) or done[-1][0] < STOP_AT:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    victim = next(member for member in family if "RayTrainWorker" in " ".join(member.cmdline()))
    os.kill(victim.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    while not (reports := list((disturbed.path / "hangs").glob("*.json"))):
        assert time.monotonic() - stopped < 30, "not named within 30 s"
        time.sleep(0.1)
    report = json.loads(reports[0].read_text())
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    assert report["kind"] == "process stopped" and len(report["ranks"]) == 1
    assert [one["pid"] for one in report["evidence"] if one["rank"] in report["ranks"]] == [victim.pid]
    assert "is stopped (SIGSTOP or a debugger)" in " ".join(output.split()) and "Ray restarted all of them" in output
    assert losses(disturbed) == losses(undisturbed)
