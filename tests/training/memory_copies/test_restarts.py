"""Random kills of ranks under the real training loop: all ranks start again, as under Ray Train, and continue from memory.

Ranks are plain processes on gloo, so that many kills take minutes. `test_kills.py` does the same under Ray.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from strata.platform import runs
from strata.platform.recipe import Recipe
from strata.platform.runs import Run
from strata.training import loop
from strata.training.loop import Job
from strata.training.memory_copies import folders
from strata.training.metrics import records

from ..failures.test_failures import losses_of, wait_until
from ..parallel.ranks import CONTEXT

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.long]

WORKERS = 4
KILLS = int(os.environ.get("STRATA_KILLS", "3"))  # of one rank, followed by a kill of two at once
STEPS = 40 + 25 * KILLS
RESTORED_S = 2.0


def train_rank(rank: int, world: int, store: Path, job: Job) -> None:
    """A rank of the real loop. Ray's report, which would store the last checkpoint, writes it here."""
    import ray.train

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}

    def report(metrics: dict[str, Any], *, checkpoint_dir_name: str, checkpoint_upload_fn: Any, **_: Any) -> None:
        checkpoint_upload_fn(None, checkpoint_dir_name)

    storage = SimpleNamespace(get_storage=lambda: SimpleNamespace(storage_filesystem=None))
    patched: Any = ray.train
    patched.report, patched.get_context, patched.Checkpoint = report, lambda: storage, lambda path, filesystem: path
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    outcome = loop.train_worker({"job": job})
    os._exit(0 if outcome.step == job.train.steps and outcome.problem is None else 1)


@contextmanager
def started(job: Job, store: Path) -> Iterator[list[BaseProcess]]:
    store.unlink(missing_ok=True)
    ranks = [CONTEXT.Process(target=train_rank, args=(rank, WORKERS, store, job)) for rank in range(WORKERS)]
    for process in ranks:
        process.start()
    try:
        yield list(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def job_of(name: str, recipe: Recipe, tokens: Path) -> Job:
    changes = {"steps": STEPS, "checkpoint_every": 1000, "eval_every": 20, "eval_sequences": 4, "max_failures": 100}
    train = recipe.train.model_copy(update=changes)
    parallel = recipe.parallel.model_copy(update={"workers": WORKERS})
    run = runs.create(name, recipe, "test")
    return Job(run.path, tokens, recipe.model, train, parallel, id=run.id() or "")


def finish(ranks: list[BaseProcess]) -> None:
    for process in ranks:
        process.join(300)
        assert process.exitcode == 0


def test_killed_ranks_cost_at_most_one_step(home: Path, tokens: Path, small_recipe: Recipe, tmp_path: Path) -> None:
    undisturbed = job_of("undisturbed", small_recipe, tokens)
    with started(undisturbed, tmp_path / "store") as ranks:
        finish(ranks)
    job = job_of("disturbed", small_recipe, tokens)
    run = Run(job.run)
    seed = time.time_ns()
    chance = random.Random(seed)
    print("seed", seed)
    reached, found = 0, []
    with folders.owned(job.id):
        for number in range(KILLS + 1):
            with started(job, tmp_path / "store") as ranks:
                wait_until(lambda number=number: len(starts_of(job)) == number + 1)
                step, source = starts_of(job)[-1]
                if number:
                    found.append((source, reached - int(step)))
                moment = records.last_step(run.metrics) + chance.randint(0, 25)
                wait_until(lambda moment=moment: records.last_step(run.metrics) >= moment)
                time.sleep(chance.uniform(0, 0.1))  # anywhere in a step
                for victim in chance.sample(ranks, 1 if number < KILLS else 2):
                    victim.kill()
                time.sleep(chance.uniform(0, 0.2))  # survivors reach the next collective
            reached = records.last_step(run.metrics)
        with started(job, tmp_path / "store") as ranks:
            finish(ranks)
    step, source = starts_of(job)[-1]
    found.append((source, reached - int(step)))
    print("source, finished steps that were repeated:", found)
    assert all(source == "memory" and repeated in (0, 1) for source, repeated in found), found
    assert losses_of(run) == losses_of(Run(undisturbed.run))
    resumed = [record["resumed"] for record in records.read(run.metrics) if "resumed" in record]
    print("seconds:", [round(one["seconds"], 3) for one in resumed])
    assert all(one["source"] == "memory" and one["seconds"] < RESTORED_S for one in resumed)
    assert folders.folder(job.id) is None, "nothing is left in memory"


def starts_of(job: Job) -> list[list[str]]:
    return [line.split() for line in job.starts.read_text().splitlines()] if job.starts.exists() else []
