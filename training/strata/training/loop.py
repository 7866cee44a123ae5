"""Training loop of a worker.

The loop draws no random numbers: the data order is a function of seed and step, and the model has no dropout. So a checkpoint
is the engine's state and the step, and a resumed run repeats the uninterrupted one exactly.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from strata.platform import file_errors
from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.platform.runs import Run
from strata.training import engine
from strata.training.checkpoint import format
from strata.training.checkpoint.saver import Saver
from strata.training.checkpoint.storage import Folder
from strata.training.data.sampler import Indices, rank_indices
from strata.training.data.windows import Windows
from strata.training.layout import accumulation, place
from strata.training.memory import peak_memory
from strata.training.metrics import records
from strata.training.metrics.records import Record
from strata.training.metrics.stopwatch import Stopwatch
from strata.training.metrics.telemetry import Telemetry, checkpoint_failures
from strata.training.model import flops
from strata.training.model.ops import IGNORED
from strata.training.schedule import Plan, learning_rate
from strata.training.steps import Batches, Stages, Whole
from strata.training.time_budget import TimeBudget, recorded, to_record


@dataclass(frozen=True)
class Job:
    """Input of a worker. Paths are absolute, on storage that all workers share."""

    run: Path
    tokens: Path
    model: ModelSection
    train: TrainSection
    parallel: ParallelSection
    id: str = ""  # the run's id
    begun: int = 0  # step of the checkpoint that the driver found
    verified: str = ""  # identity of that checkpoint, whose digests the driver has verified
    phases: tuple[tuple[str, float], ...] = ()  # startup phases of the command so far, in seconds

    @property
    def stop(self) -> Path:
        """File with which the driver requests a stop: Ray Train cannot send messages to running workers."""
        return self.run / "stop"

    @property
    def starts(self) -> Path:
        """File with one line per start of the workers: the step they started from. Several lines mean that workers died."""
        return self.run / "starts"

    @property
    def checkpoints(self) -> Folder:
        return format.location(Run(self.run), self.train)

    @property
    def origin(self) -> format.Origin:
        return format.Origin(self.model.model_dump(), self.tokens.name, self.train.batch, self.train.seed, self.id)


@dataclass(frozen=True)
class Outcome:
    """Result of a worker. A `problem` that would recur is returned rather than raised, because Ray restarts the workers after an
    exception."""

    step: int
    stopped: bool = False
    problem: UserError | None = None


def train_worker(config: dict[str, Job]) -> Outcome:
    """Entry point of a Ray Train worker. Rank 0 writes records to the run's folder and metrics to Prometheus."""
    job = config["job"]
    if dist.get_rank() != 0:
        try:
            worker, saver, step = _begin(job)
        except UserError as problem:
            return Outcome(0, problem=problem)
        return train(worker, step, _silent, saver, problem=lambda: _explained(job, saver.problem))
    tokens_per_step = job.train.batch * job.model.context
    telemetry = Telemetry(job.run.name, job.train.steps, tokens_per_step, restarts=_starts(job))
    with telemetry, records.Writer(Run(job.run).metrics) as history:
        try:
            worker, saver, step = _begin(job)
        except UserError as problem:
            return Outcome(0, problem=problem)
        report = _reporter(job, step, saver, telemetry, history)
        return train(worker, step, report, saver, telemetry.not_finite, lambda: _explained(job, saver.problem or history.problem))


def _begin(job: Job) -> tuple["Worker", Saver, int]:
    worker = Worker(job)
    failed = checkpoint_failures(job.run.name)
    saver = Saver(job.checkpoints, worker.engine, job.model, job.train, job.parallel, job.origin, failed)
    step = saver.resume(job.verified, lambda: max(job.begun, records.last_saved(Run(job.run).metrics)))
    worker.continue_plan(step)
    return worker, saver, step


def _explained(job: Job, error: OSError | None) -> UserError | None:
    return file_errors.explain(error, f"resume with: strata train --resume {job.run.name}") if error else None


def run_local(job: Job, report: Callable[[Record], None]) -> Outcome:
    """Trains without Ray and without checkpoints, in the caller's process group. For benchmarks and tests."""
    worker = Worker(job)
    return train(worker, 0, report if worker.rank == 0 else _silent, None)


def train(
    worker: "Worker",
    step: int,
    report: Callable[[Record], None],
    saver: Saver | None,
    not_finite: Callable[[], None] = lambda: None,
    problem: Callable[[], UserError | None] = lambda: None,
) -> Outcome:
    """Trains from `step` to the last step or until a stop is requested. A non-finite loss or gradient norm ends the run before
    it can reach a checkpoint.

    A `problem` of one rank, such as a full disk, ends the run on all ranks at the same step. It is also checked before a save: a
    checkpoint after the last recorded step would leave a permanent hole in the run's history."""
    section = worker.job.train
    stall: float | None = None
    while step < worker.plan.steps:
        begin = time.perf_counter()
        loss, stop, failed = worker.step(step, problem() is not None)
        step += 1
        record = worker.record(step, loss, time.perf_counter() - begin)
        if stall is not None:  # caused by the save before this step
            record["checkpoint_stall_s"] = record["seconds"]["checkpoint"] = stall
            stall = None
        if diverged := _not_finite(record):
            not_finite()
            return Outcome(step, problem=diverged)
        if failed:
            return Outcome(step, problem=worker.agree(problem()))
        last = stop or step == worker.plan.steps
        if last or step % section.eval_every == 0:
            record["val_loss"] = worker.evaluate()
        report(record)
        if saver and (last or step % section.checkpoint_every == 0):
            if common := worker.agree(problem()):
                return Outcome(step, problem=common)
            stall = saver.save(step, record.get("val_loss"), "sync" if last else section.checkpoint_upload)
            if last and (common := worker.agree(problem())):
                return Outcome(step, problem=common)
        if stop:
            return Outcome(step, stopped=step < worker.plan.steps)
    return Outcome(step)


class Worker:
    """One rank: its engine and its data."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.engine: Any = engine.build(job.model, job.train, job.parallel)
        self._watch = Stopwatch(torch.device(self.engine.device))
        self._steps = (
            Stages(self.engine, self._watch)
            if job.parallel.pipeline > 1
            else Whole(self.engine, job.model, job.parallel, self._watch)
        )
        self._train_windows = Windows(job.tokens, "train", job.model.context)
        self._validation_windows = Windows(job.tokens, "validation", job.model.context)
        self._peak = self._peak_flops() if self.rank == 0 else None
        self.plan = Plan.of(job.train)
        self._budget: TimeBudget | None = None

    def continue_plan(self, step: int) -> None:
        """Follows the time budget, from the plan recorded at `step`. Called by all ranks; rank 0 decides."""
        train = self.job.train
        if train.time_budget_s is None:
            return
        found: list[tuple[Plan, float]] = [(self.plan, 0.0)]
        if self.rank == 0:
            history = records.read(Run(self.job.run).metrics) if step else []
            found = [recorded(next((record for record in reversed(history) if record["step"] == step), None), train)]
        dist.broadcast_object_list(found, 0)
        self.plan, spent = found[0]
        if self.rank == 0:
            self._budget = TimeBudget(train, spent)

    def step(self, step: int, failed: bool = False) -> tuple[float, bool, bool]:
        """Runs a step. Returns the mean loss over all ranks, whether a stop was requested, and whether any rank `failed` to
        write. One small all-reduce carries these three, and the number of steps that rank 0 plans."""
        section, parallel = self.job.train, self.job.parallel
        rate = learning_rate(step, section, self.plan)
        engine.set_learning_rate(self.engine, rate)
        indices = rank_indices(step, self.rank, section.batch, len(self._train_windows), section.seed, parallel)
        micro_batches = np.split(indices, accumulation(section, parallel))
        loss = self._steps.train(self._batches(self._train_windows, micro_batches), len(micro_batches))
        stop = self.rank == 0 and self.job.stop.exists()
        steps = self._budget.finished(step + 1, self.plan).steps if self._budget else 0
        # float64: an fp32 number of steps would be inexact beyond 16 million
        sums = torch.cat([loss.reshape(1).double(), loss.new_tensor([stop, failed, steps], dtype=torch.float64)])
        dist.all_reduce(sums)
        mean, stop_sum, failed_sum, steps = sums.tolist()
        if steps and steps != self.plan.steps:
            self.plan = self.plan.revised(step + 1, int(steps))
        return mean / self.world, stop_sum > 0, failed_sum > 0

    def agree(self, problem: UserError | None) -> UserError | None:
        """The problem of the lowest rank that has one. Called by all ranks."""
        problems: list[UserError | None] = [None] * self.world
        dist.all_gather_object(problems, problem)
        return next(filter(None, problems), None)

    def record(self, step: int, loss: float, seconds: float) -> Record:
        norm = self.engine.get_global_grad_norm()
        rate = self.job.train.batch * self.job.model.context / seconds
        record = Record(
            step=step,
            loss=loss,
            lr=self.engine.optimizer.param_groups[0]["lr"],
            grad_norm=None if norm is None else float(norm),
            tokens_per_s=rate,
            time=time.time(),
            seconds=self._watch.read(),
            peak_memory_bytes=peak_memory(torch.device(self.engine.device)),
        )
        if self._budget:
            record["plan"] = to_record(self.plan, self._budget.spent, self.job.train)
        mfu = flops.mfu(rate, flops.flops_per_token(self.job.model), self.world, self._peak)
        if mfu is not None:
            record["mfu"] = mfu
        return record

    def _peak_flops(self) -> float | None:
        """Peak FLOP/s of a device. Measured on rank 0 while the other ranks wait: on a laptop they share its cores."""
        parallel = self.job.parallel
        return flops.peak_flops(parallel.device, self.job.train.precision, parallel.cpus_per_worker)

    def evaluate(self) -> float:
        """Validation loss. All ranks run the same number of forward passes; padding has ignored targets."""
        section, parallel = self.job.train, self.job.parallel
        indices = self._validation_windows.evenly(section.eval_sequences)
        per_round = parallel.data * section.micro_batch
        rounds = math.ceil(len(indices) / per_round)
        if parallel.schedule == "dualpipev":  # evaluates in whole steps
            rounds = math.ceil(rounds / accumulation(section, parallel)) * accumulation(section, parallel)
        padded = np.resize(indices, rounds * per_round)
        counts = np.arange(len(padded)) < len(indices)
        mine = slice(place(self.rank, parallel).data, None, parallel.data)
        batches = self._batches(self._validation_windows, np.split(padded[mine], rounds), np.split(counts[mine], rounds))
        mean = self._steps.evaluate(batches, rounds).clone()
        dist.all_reduce(mean)
        self._watch.read()  # discards the evaluation's time, which is not part of the next step
        return mean.item() / self.world * len(padded) / len(indices)

    def _batches(self, windows: Windows, batches: list[Indices], counts: list[Any] | None = None) -> Batches:
        for number, indices in enumerate(batches):
            with self._watch.phase("data"):
                tokens = torch.from_numpy(windows.read(indices)).to(self.engine.device)
                targets = tokens[:, 1:].clone()
                if counts is not None:
                    targets[~torch.from_numpy(counts[number])] = IGNORED
            yield tokens[:, :-1], targets


def _not_finite(record: Record) -> UserError | None:
    for key, value in (("loss", record["loss"]), ("gradient norm", record["grad_norm"])):
        if value is not None and not math.isfinite(value):
            fix = "Lower train.lr or raise train.warmup, and resume from the last checkpoint with --resume."
            return UserError(f"The {key} is {value} at step {record['step']}.", fix)
    return None


def _starts(job: Job) -> int:
    return len(job.starts.read_text().splitlines()) if job.starts.exists() else 0


def _reporter(job: Job, step: int, saver: Saver, telemetry: Telemetry, history: records.Writer) -> Callable[[Record], None]:
    records.cut(Run(job.run).metrics, step)
    with job.starts.open("a") as starts:
        starts.write(f"{step}\n")
    if saver.last:
        telemetry.saved(saver.last.step, saver.last.size, saver.last.at)

    def report(record: Record) -> None:
        if saver.last:
            telemetry.saved(saver.last.step, saver.last.size, saver.last.at)
            record["checkpoint_step"] = saver.last.step
            if saver.last.seconds is not None:
                record["checkpoint_s"] = saver.last.seconds
        history.append(record)
        # A run resumed from a checkpoint needs all records before it; the last step of a run has a validation loss.
        if record["step"] % job.train.checkpoint_every == 0 or "val_loss" in record:
            history.flush()
        telemetry.record(record)

    return report


def _silent(_: Record) -> None:
    """`report` of ranks other than 0: records already cover all ranks."""
