"""Copies of real engines in every kind of layout: exact, made between two updates, and loaded with the same losses.

Ranks are plain processes on gloo. Copies are slowed down, so that an optimizer which does not wait would change their values.
"""

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

from strata.platform import recipe_file
from strata.training.checkpoint.saver import Saver
from strata.training.checkpoint.storage import folder
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.loop import Job, Worker
from strata.training.memory_copies import agreement, copier, folders
from strata.training.parallel import optimizer_state

from ..conftest import SMALL, VOCAB
from ..parallel.ranks import on_ranks

pytestmark = pytest.mark.slow

STEPS, MORE = 4, 3
SHAPE = ("model.layers=4", "model.kv_heads=4", "train.batch=8", "train.micro_batch=2", "train.steps=40")
MIXTURE = "model.moe.experts=4 model.moe.top_k=2 train.lr=1e-3"
LORA = "train.lora.rank=4 train.lora.dropout=0.1"
ALWAYS = {"pipeline": "workers=2 pipeline=2 zero=0"}
ROTATED = {
    "ZeRO-1, bf16": "workers=2 zero=1 train.precision=bf16",
    "ZeRO-0": "workers=2 zero=0",
    "ZeRO-0, bf16": "workers=2 zero=0 train.precision=bf16",
    "ZeRO-3": "workers=2 zero=3",
    "ZeRO-2, offloaded optimizer": "workers=2 zero=2 offload=optimizer",
    "ZeRO-3, offloaded parameters": "workers=2 zero=3 offload=all",
    "data x tensor": "workers=4 tensor=2 zero=1",
    "DualPipeV": "workers=2 pipeline=2 schedule=dualpipev zero=0",
    "pipeline, ZeRO-1, bf16": "workers=4 pipeline=2 zero=1 train.precision=bf16 train.micro_batch=1",
    "expert": f"workers=2 expert=2 zero=0 {MIXTURE}",
    "adapters": f"workers=2 zero=2 {LORA}",
}
LAYOUTS = ALWAYS | ROTATED


def job_of(layout: str, corpus: Path, home: Path, run: str) -> Job:
    overrides = [key if "." in key else f"parallel.{key}" for key in layout.split()]
    recipe = recipe_file.load("laptop", [*SMALL, *SHAPE, f"data.path={corpus}", *overrides])
    tokens = shards.prepare(open_corpus(recipe.data), VOCAB, 0.1)
    return Job(home / "run", tokens, recipe.model, recipe.train, recipe.parallel, id=run)


def slow_copies(self: Any, *arguments: Any) -> int:
    time.sleep(0.3)
    return REAL_COPY(self, *arguments)


REAL_COPY = copier.Copier._copy_values


def steps(worker: Worker, first: int, count: int, copies: copier.Copier | None = None) -> list[float]:
    losses = []
    for step in range(first, first + count):
        losses.append(worker.step(step)[0])
        if copies:
            copies.after_step(step + 1)
    return losses


def train_and_copy(job: Job) -> tuple[list[float], list[tuple[str, int, float]]]:
    """Losses, and sums of this rank's state after `STEPS`, of which a slow copy is made while the next step runs."""
    copier.Copier._copy_values = slow_copies  # type: ignore[method-assign]
    worker = Worker(job)
    memory = agreement.find(job.id, job.origin, lambda: 0)
    assert memory and memory.whole is None
    copies = memory.copier(worker.engine, job.model, job.parallel, job.origin, 1)
    assert copies
    losses = steps(worker, 0, STEPS, copies)
    state = state_of(worker)
    losses += steps(worker, STEPS, 1)  # changes the values, after the copy
    return losses + steps(worker, STEPS + 1, MORE - 1), state


def state_of(worker: Worker) -> list[tuple[str, int, float]]:
    parts = optimizer_state.fragments(worker.engine, worker.job.model, worker.job.parallel)
    return [(f"{part.shard.name} {part.kind}", part.start, float(part.values.double().square().sum())) for part in parts]


def continue_from_copy(job: Job, checkpoints: Path, last: int) -> tuple[str, int, list[tuple[str, int, float]], list[float]]:
    worker = Worker(job)
    memory = agreement.find(job.id, job.origin, lambda: last)
    assert memory
    saver = Saver(folder(checkpoints), worker.engine, job.model, job.train, job.parallel, job.origin, lambda: None)
    resumed = saver.resume(in_memory=memory.whole)
    state = state_of(worker)
    copies = memory.copier(worker.engine, job.model, job.parallel, job.origin, 1)
    return resumed.source, resumed.step, state, steps(worker, resumed.step, STEPS + MORE - resumed.step, copies)


def run_of(home: Path) -> str:
    """Id of a run. Its folder is the real one: forked ranks do not see a test's changes of the environment."""
    return "test" + hashlib.sha256(str(home).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.rotation) for name in LAYOUTS])
def test_run_continues_from_memory_with_the_same_losses(name: str, corpus: Path, home: Path) -> None:
    job = job_of(LAYOUTS[name], corpus, home, run_of(home))
    workers = job.parallel.workers
    with folders.owned(job.id):
        trained = on_ranks(workers, train_and_copy, job)
        found = on_ranks(workers, continue_from_copy, job, home / "none", STEPS)
        for (losses, state), (source, step, loaded, again) in zip(trained, found, strict=True):
            assert (source, step) == ("memory", STEPS)
            assert loaded == state, "the copy has exactly the values between two updates"
            assert again == losses[STEPS:]


@pytest.mark.rotation
def test_copies_load_in_another_layout(corpus: Path, home: Path) -> None:
    run = run_of(home)
    before = job_of("workers=4 zero=3", corpus, home, run)
    after = job_of("workers=3 pipeline=3 zero=0 train.micro_batch=1", corpus, home, run)
    with folders.owned(run):
        trained = on_ranks(4, train_and_copy, before)
        found = on_ranks(3, continue_from_copy, after, home / "none", STEPS)
        for source, step, _, losses in found:
            assert (source, step) == ("memory", STEPS)
            assert losses == pytest.approx(trained[0][0][STEPS:], abs=1e-5)


def test_step_without_a_record_is_not_continued(corpus: Path, home: Path) -> None:
    """A run that continued after the last step in its history would have a hole in it for ever."""
    job = job_of("workers=2 zero=0", corpus, home, run_of(home))
    with folders.owned(job.id):
        trained = on_ranks(2, train_and_copy, job)
        for source, step, _, losses in on_ranks(2, continue_from_copy, job, home / "none", STEPS - 1):
            assert (source, step) == ("memory", STEPS - 1)
            assert losses == trained[0][0][STEPS - 1 :]


def test_too_little_memory_turns_copies_off(corpus: Path, home: Path) -> None:
    job = job_of("workers=2 zero=0", corpus, home, run_of(home))
    with folders.owned(job.id):
        assert on_ranks(2, without_memory, job) == [True, True]


def without_memory(job: Job) -> bool:
    worker = Worker(job)
    memory = agreement.find(job.id, job.origin, lambda: 0)
    assert memory
    agreement.LARGEST_SHARE = 1e-9 if worker.rank == 1 else 0.5  # one rank is short of memory: none makes copies
    return memory.copier(worker.engine, job.model, job.parallel, job.origin, 1) is None
