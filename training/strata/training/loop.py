"""What each worker runs.

Nothing in the loop draws random numbers: the order of the data is a function of seed and step, and the model has no dropout.
So the state to save is the engine's and the step, and a resumed run repeats the uninterrupted one exactly.
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
from strata.training.schedule import learning_rate
from strata.training.steps import Batches, Stages, Whole


@dataclass(frozen=True)
class Job:
    """All that a worker is told. Paths are absolute, on storage that all workers share."""

    run: Path
    tokens: Path
    model: ModelSection
    train: TrainSection
    parallel: ParallelSection
    id: str = ""  # the run's
    begun: int = 0  # the step of the checkpoint that the driver found
    verified: str = ""  # the identity of that checkpoint, whose files the driver has compared with their digests
    phases: tuple[tuple[str, float], ...] = ()  # of the command so far, in seconds

    @property
    def stop(self) -> Path:
        """The driver asks for a stop by making this file: Ray has no other message to running workers."""
        return self.run / "stop"

    @property
    def starts(self) -> Path:
        """A line for each start of the workers, with the step they began from: more than one says that some were lost."""
        return self.run / "starts"

    @property
    def checkpoints(self) -> Folder:
        return format.location(Run(self.run), self.train)

    @property
    def origin(self) -> format.Origin:
        return format.Origin(self.model.model_dump(), self.tokens.name, self.train.batch, self.train.seed, self.id)


@dataclass(frozen=True)
class Outcome:
    """A problem that would come again is returned, not raised: Ray answers an exception by restarting the workers."""

    step: int
    stopped: bool = False
    problem: UserError | None = None


def train_worker(config: dict[str, Job]) -> Outcome:
    """Under Ray Train: records to the run's folder and to Prometheus, checkpoints to its storage."""
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
    return worker, saver, saver.resume(job.verified, lambda: max(job.begun, records.last_saved(Run(job.run).metrics)))


def _explained(job: Job, error: OSError | None) -> UserError | None:
    return file_errors.explain(error, f"go on with: strata train --resume {job.run.name}") if error else None


def run_local(job: Job, report: Callable[[Record], None]) -> Outcome:
    """Without Ray and without checkpoints, in a process group that the caller has set up: for benchmarks and tests."""
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
    """From `step` on, to the end or until asked to stop. A run that turns NaN stops before it saves: neither a loss nor a
    gradient that is not finite gets into a checkpoint.

    A `problem` of one rank, such as a full disk, ends the run on all of them at the same step. It is looked for before a save
    too: a checkpoint beyond the last step in the history would leave a gap there for ever."""
    section = worker.job.train
    stall: float | None = None
    while step < section.steps:
        begin = time.perf_counter()
        loss, stop, failed = worker.step(step, problem() is not None)
        step += 1
        record = worker.record(step, loss, time.perf_counter() - begin)
        if stall is not None:  # of the save before this step
            record["checkpoint_stall_s"] = record["seconds"]["checkpoint"] = stall
            stall = None
        if diverged := _not_finite(record):
            not_finite()
            return Outcome(step, problem=diverged)
        if failed:
            return Outcome(step, problem=worker.agree(problem()))
        last = stop or step == section.steps
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
            return Outcome(step, stopped=step < section.steps)
    return Outcome(step)


class Worker:
    """One rank: its engine, its view of the data, and its place among the others."""

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

    def step(self, step: int, failed: bool = False) -> tuple[float, bool, bool]:
        """The loss over all ranks, whether rank 0 was asked to stop, and whether any rank has `failed` to write: one small
        reduction carries all three."""
        section, parallel = self.job.train, self.job.parallel
        rate = learning_rate(step, section.steps, section.lr, section.warmup, section.min_lr_ratio)
        engine.set_learning_rate(self.engine, rate)
        indices = rank_indices(step, self.rank, section.batch, len(self._train_windows), section.seed, parallel)
        micro_batches = np.split(indices, accumulation(section, parallel))
        loss = self._steps.train(self._batches(self._train_windows, micro_batches), len(micro_batches))
        asked = self.rank == 0 and self.job.stop.exists()
        sums = torch.cat([loss.reshape(1), loss.new_tensor([float(asked), float(failed)])])
        dist.all_reduce(sums)
        return sums[0].item() / self.world, sums[1].item() > 0, sums[2].item() > 0

    def agree(self, problem: UserError | None) -> UserError | None:
        """The first rank's problem, if any has one. All ranks call this."""
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
        mfu = flops.mfu(rate, flops.flops_per_token(self.job.model), self.world, self._peak)
        if mfu is not None:
            record["mfu"] = mfu
        return record

    def _peak_flops(self) -> float | None:
        """Measured while the other ranks wait for this one: on a laptop they share its cores."""
        parallel = self.job.parallel
        return flops.peak_flops(parallel.device, self.job.train.precision, parallel.cpus_per_worker)

    def evaluate(self) -> float:
        """Every rank runs as many forward passes as the others, on padding if need be, whose targets do not count."""
        section, parallel = self.job.train, self.job.parallel
        indices = self._validation_windows.evenly(section.eval_sequences)
        at_once = parallel.data * section.micro_batch
        rounds = math.ceil(len(indices) / at_once)
        if parallel.schedule == "dualpipev":  # which evaluates in whole steps
            rounds = math.ceil(rounds / accumulation(section, parallel)) * accumulation(section, parallel)
        padded = np.resize(indices, rounds * at_once)
        counts = np.arange(len(padded)) < len(indices)
        mine = slice(place(self.rank, parallel).data, None, parallel.data)
        batches = self._batches(self._validation_windows, np.split(padded[mine], rounds), np.split(counts[mine], rounds))
        mean = self._steps.evaluate(batches, rounds).clone()
        dist.all_reduce(mean)
        self._watch.read()  # an evaluation is no part of the next step
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
            fix = "Lower train.lr or raise train.warmup, and go on from the last checkpoint with --resume."
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
        # A run that goes on from a checkpoint has the steps before it; the last step of a run has a validation loss.
        if record["step"] % job.train.checkpoint_every == 0 or "val_loss" in record:
            history.flush()
        telemetry.record(record)

    return report


def _silent(_: Record) -> None:
    """Ranks other than the first have nothing to say: a record is of all ranks already."""
