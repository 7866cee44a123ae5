"""Kills of Ray Train's workers: the run continues from memory, at most one step back, with the losses of an undisturbed run."""

import json
import os
import random
import time
from pathlib import Path

import pytest

from strata.platform.runs import Run
from strata.training.memory_copies import folders
from strata.training.metrics import records

from ..conftest import SMALL, strata_process
from ..failures.test_failures import losses_of, wait_until, workers_of

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.long]

WORKERS = 4
# Kills of one worker, followed by a kill of two at once. Each takes half a minute, most of it for the restart.
KILLS = int(os.environ.get("STRATA_KILLS", "2"))
STEPS = 60 + 40 * KILLS
SETTINGS = (
    *(f"train.steps={STEPS}", "train.eval_every=50", "train.max_failures=100", f"parallel.workers={WORKERS}"),
    "train.checkpoint_every=1000",  # only memory has a step to continue from
)
RESTORED_S = 2.0


def last_step(run: Run) -> int:
    return records.last_step(run.metrics)


def starts_of(run: Run) -> list[list[str]]:
    path = run.path / "starts"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_lost_workers_cost_at_most_one_step(home: Path, corpus: Path) -> None:
    settings = [*SMALL, f"data.path={corpus}", *SETTINGS]
    undisturbed, disturbed = (Run(home / "runs" / name) for name in ("undisturbed", "disturbed"))
    process = strata_process(home, "train", "--run", undisturbed.name, *settings)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output

    seed = time.time_ns()
    chance = random.Random(seed)
    print("seed", seed)
    process = strata_process(home, "train", "--run", disturbed.name, *settings)
    found = []
    for number in range(KILLS + 1):
        begin = last_step(disturbed)
        moment = begin + chance.randint(1, 30)
        wait_until(lambda moment=moment: last_step(disturbed) >= moment, timeout=300)
        time.sleep(chance.uniform(0, 0.1))  # anywhere in a step
        victims = chance.sample(workers_of(process.pid), 1 if number < KILLS else 2)
        before = len(starts_of(disturbed))
        for victim in victims:
            victim.kill()
        reached = last_step(disturbed)  # survivors may record one more step
        wait_until(lambda before=before: len(starts_of(disturbed)) > before, timeout=300)
        step, source = starts_of(disturbed)[-1]
        found.append((source, reached - int(step)))
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    print(found)
    assert all(source == "memory" and repeated <= 1 for source, repeated in found), found
    assert output.count("from memory.") == KILLS + 1
    assert losses_of(disturbed) == losses_of(undisturbed)
    resumed = [record["resumed"] for record in records.read(disturbed.metrics) if "resumed" in record]
    print(json.dumps(resumed))
    assert len(resumed) == KILLS + 1 and all(one["seconds"] < RESTORED_S for one in resumed)
    identity = disturbed.id()
    assert identity and folders.folder(identity) is None, "nothing is left in memory"
