"""Corrupted replicas and left-out batches, in real engines on gloo."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.platform import recipe_file
from strata.platform.recipe import Recipe
from strata.training import loop
from strata.training.loop import Job, Worker
from strata.training.metrics.records import Record
from strata.training.watchdog import replicas, spikes
from strata.training.watchdog.replicas import Replica, ReplicaDiffers, checksum, different

from ..parallel.ranks import on_ranks

VICTIM, AT, EVERY = 1, 4, 3


def job_of(recipe: Recipe, run: Path, tokens: Path, *settings: str) -> Job:
    changed = recipe_file.change(recipe, ["train.batch=6", "train.steps=12", "parallel.workers=3", *settings])
    return Job(run, tokens, changed.model, changed.train, changed.parallel)


def train_with(job: Job, fault: str) -> tuple[int, tuple[int, ...], str]:
    """Trains with a fault in one rank. Returns the step of the error, the ranks that it names, and its message."""
    worker = Worker(job)
    for step in range(job.train.steps):
        if worker.rank == VICTIM and step == AT:
            plant(worker, fault)
        try:
            worker.step(step)
        except ReplicaDiffers as error:
            return step, error.ranks, str(error)
    return job.train.steps, (), ""


def plant(worker: Worker, fault: str) -> None:
    parameters = [p for p in worker.engine.module.parameters() if p.requires_grad]
    if fault == "bit":
        parameters[2].data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
    elif fault == "gradient":
        parameters[2].register_hook(lambda gradient: gradient * 1e4)
    elif fault == "nan":
        parameters[2].register_hook(lambda gradient: gradient * math.nan)


@pytest.mark.slow
@pytest.mark.rotation
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("fault", ["bit", "gradient", "nan", "none"])
def test_corrupted_replica_is_named(fault: str, zero: int, tmp_path: Path, tokens: Path, small_recipe: Recipe) -> None:
    # ZeRO overwrites its replicas of parameters in each step, and after a step with a NaN all replicas have it.
    every = 1 if fault == "nan" or (zero and fault == "bit") else EVERY
    job = job_of(small_recipe, tmp_path, tokens, f"parallel.zero={zero}", f"train.watchdog.check_every={every}")
    for step, ranks, message in on_ranks(3, train_with, job, fault):
        if fault == "none":
            assert (step, ranks) == (job.train.steps, ())
            continue
        assert AT <= step < AT + EVERY and ranks == (VICTIM,), message
        assert f"rank {VICTIM} on " in message


def leave_out(job: Job) -> tuple[str, list[float], list[spikes.LeftOut], list[list[int]]]:
    """Trains until a NaN loss of one rank at step AT, and again from the start with the batch left out."""
    worker = Worker(job)
    worker._steps = Poisoned(worker, worker._steps)  # type: ignore[assignment]
    records: list[Record] = []
    try:
        loop.train(worker, 0, records.append, None)
        message = ""
    except spikes.BatchLeftOut as error:
        message = str(error)
    again = Worker(job)
    again._steps = Poisoned(again, again._steps)  # type: ignore[assignment]
    loop.train(again, 0, records.append, None)
    orders = [[int(row) for row in each._order(AT)] for each in (worker, again)]
    return message, [record["loss"] for record in records], spikes.read(job.run), orders


class Poisoned:
    """Steps whose loss is NaN on one rank for the batch of step AT in the data order."""

    def __init__(self, worker: Worker, steps: Any) -> None:
        self._worker, self._steps = worker, steps
        self._bad = [int(row) for row in worker.data.order(AT, worker.job.train.batch, 0, 1, worker.job.train.seed)]
        self._step = 0

    def train(self, batches: Any, count: int) -> torch.Tensor:
        now = [int(row) for row in self._worker._order(self._step)]
        self._step += 1
        loss: torch.Tensor = self._steps.train(batches, count)
        return loss * math.nan if now == self._bad and self._worker.rank == VICTIM else loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)


@pytest.mark.slow
def test_batch_with_a_nan_is_left_out_and_its_documents_are_named(tmp_path: Path, tokens: Path, small_recipe: Recipe) -> None:
    job = job_of(small_recipe, tmp_path, tokens, "train.on_spike={}")
    message, losses, batches, orders = on_ranks(3, leave_out, job)[0]
    assert f"The loss is nan at step {AT + 1}." in message and "tokens " in message and "train-00000.bin" in message
    assert [batch.step for batch in batches] == [AT] and len(batches[0].documents) == 2  # of one rank's two rows
    assert orders[0] != orders[1] and len(losses) == AT + job.train.steps and all(map(math.isfinite, losses))


def replica(rank: int, checksum: int = 7, norm: float | None = 1.0, part: tuple[int, ...] = (0, 0)) -> Replica:
    return Replica(rank, part, f"host-{rank}", checksum, norm)


def test_odd_replica_is_named() -> None:
    assert different([replica(0), replica(1), replica(2)]) is None
    found = different([replica(0), replica(1, checksum=8), replica(2)])
    assert found and found.ranks == (1,) and "rank 1 on host-1" in str(found)
    tied = different([replica(0), replica(1, checksum=8)])
    assert tied and tied.ranks == (0, 1) and "cannot be told" in str(tied)
    stages = [replica(0), replica(1, checksum=8, part=(1, 0)), replica(2), replica(3, checksum=8, part=(1, 0))]
    assert different(stages) is None


def test_odd_gradient_is_named() -> None:
    assert different([replica(0, norm=1.0), replica(1, norm=9.0), replica(2, norm=0.2)]) is None
    for norm in (20.0, 0.01, math.nan, math.inf):
        found = different([replica(0), replica(1), replica(2, norm=norm)])
        assert found and found.ranks == (2,), norm
    assert different([replica(0, norm=math.nan), replica(1, norm=math.nan)]) is None, "the loss shows it"
    of_two = different([replica(0, norm=50.0), replica(1, norm=1.0)], before={0: 1.2, 1: 1.1})
    assert of_two and of_two.ranks == (0,)


def test_every_flipped_bit_changes_the_checksum() -> None:
    for dtype, kind in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        values = torch.randn(33).to(dtype)
        before = checksum([values])
        for bit in range(8 * values.element_size() - 1):
            flipped = values.clone()
            flipped[7:8].view(kind).bitwise_xor_(1 << bit)
            assert checksum([flipped]) != before


def test_a_run_without_replicas_compares_nothing(tmp_path: Path, small_recipe: Recipe) -> None:
    assert replicas.different([replica(0, norm=None)]) is None
    assert spikes.read(tmp_path) == []
    assert replace(replica(0), norm=None).norm is None
