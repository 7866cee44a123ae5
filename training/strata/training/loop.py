"""Training loop of a worker.

The data order and the dropout of adapters are functions of seed and step. So a checkpoint is the engine's state and the step,
and a resumed run repeats the uninterrupted one exactly.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from strata.platform import file_errors
from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.platform.runs import Run
from strata.training import engine
from strata.training.batch import Batch, Pictures, on_device
from strata.training.checkpoint import format, pretrained, starting_weights
from strata.training.checkpoint.saver import Resumed, Saver
from strata.training.checkpoint.storage import Folder
from strata.training.data import windows
from strata.training.data.finetuning import rows as finetuning_rows
from strata.training.data.pictures import draws
from strata.training.data.rows import Rows, TrainingData, mean_divisor
from strata.training.data.sampler import Indices, micro_batches
from strata.training.data.shards import Split
from strata.training.diffusion import progress as picture_progress
from strata.training.diffusion.export import whole_model
from strata.training.diffusion.progress import Grids, PicturePrompts
from strata.training.diffusion.sampling import sample
from strata.training.distillation import objective as distillation
from strata.training.evaluation import samples
from strata.training.evaluation.samples import NextTokens, Prompts
from strata.training.exclusion import corruption
from strata.training.layout import accumulation, described, place
from strata.training.memory import peak_memory
from strata.training.memory_copies import agreement, folders
from strata.training.memory_copies.copier import Copier
from strata.training.metrics import records
from strata.training.metrics.records import Record
from strata.training.metrics.stopwatch import Stopwatch
from strata.training.metrics.telemetry import Telemetry, checkpoint_failures, rank_seconds
from strata.training.metrics.trackers import Trackers
from strata.training.model import flops
from strata.training.parallel import weight_average
from strata.training.preferences import losses
from strata.training.preferences.answers import Reference, answers_of
from strata.training.preferences.reference_pass import ReferenceModel
from strata.training.profile.capture import Profiler
from strata.training.schedule.early_stop import EarlyStop
from strata.training.schedule.learning_rate import Plan, learning_rate
from strata.training.schedule.time_budget import TimeBudget, recorded, to_record
from strata.training.steps import Batches, Flow, Stages, Whole
from strata.training.targets import IGNORED
from strata.training.watchdog import spikes
from strata.training.watchdog.monitor import Monitor
from strata.training.watchdog.pulse import Pulse
from strata.training.watchdog.replicas import Comparison, ReplicaDiffers

PHASE_EVERY_S = 1.0


class Request(IntEnum):
    """Request of the driver to the workers, which end after the current step with a checkpoint."""

    NONE = 0
    RESIZE = 1
    STOP = 2


@dataclass(frozen=True)
class Job:
    """Input of a worker. Paths are absolute, on storage that all workers share."""

    run: Path
    tokens: Path
    model: ModelSection
    train: TrainSection
    parallel: ParallelSection
    id: str = ""  # the run's id
    begun: int = 0  # step from which the workers will continue, by what the driver found in storage or in memory
    stored: int = 0  # step of the checkpoint that the driver found
    verified: str = ""  # identity of that checkpoint, whose digests the driver has verified
    mix: tuple[float, ...] = ()  # weights of the sets in `tokens`, for fine-tuning; none: `tokens` has windows of a corpus
    phases: tuple[tuple[str, float], ...] = ()  # startup phases of the command so far, in seconds
    prompts: Prompts | None = None  # of `train.samples`
    pictures: PicturePrompts | None = None  # captions to draw

    @property
    def stop(self) -> Path:
        """File with which the driver requests a stop: Ray Train cannot send messages to running workers."""
        return self.run / "stop"

    @property
    def resize(self) -> Path:
        """File with which the driver requests a checkpoint and the end of this attempt, to continue in another layout."""
        return self.run / "resize"

    def request(self) -> Request:
        """The driver's request, read by rank 0 after each step."""
        if self.stop.exists():
            return Request.STOP
        return Request.RESIZE if self.resize.exists() else Request.NONE

    @property
    def nodes(self) -> Path:
        """File with the id of each rank's Ray node."""
        return self.run / "nodes"

    @property
    def starts(self) -> Path:
        """File with one line per start of the workers: the step they started from, and "memory" or "checkpoint" as its source.
        Several lines mean that workers died."""
        return self.run / "starts"

    @property
    def phase(self) -> Path:
        """File with the workers' current phase before their first step, if it takes long."""
        return self.run / "phase"

    @property
    def checkpoints(self) -> Folder:
        return format.location(Run(self.run), self.train)

    @property
    def origin(self) -> format.Origin:
        return format.Origin(self.model.model_dump(mode="json"), self.tokens.name, self.train.batch, self.train.seed, self.id)


@dataclass(frozen=True)
class Outcome:
    """Result of a worker. A `problem` that would recur is returned rather than raised, because Ray restarts the workers after an
    exception."""

    step: int
    stopped: bool = False
    problem: UserError | None = None
    resized: bool = False  # ended with a checkpoint, to continue in another layout


def training_data(job: Job) -> TrainingData:
    if job.model.picture:
        return draws.training_data(job.tokens, job.model, job.train)
    if job.mix:
        return finetuning_rows.training_data(job.tokens, job.mix)
    return windows.training_data(job.tokens, job.model.context)


def train_worker(config: dict[str, Job]) -> Outcome:
    """Entry point of a Ray Train worker."""
    job, pulse = config["job"], Pulse()
    with Monitor(job.run, pulse):
        try:
            return _train_worker(job, pulse)
        except ReplicaDiffers as error:  # copies since the damage have it too; the newest checkpoint does not
            folders.discard(job.id)
            corruption.exclude(job.run, job.parallel, error)
            raise


def _train_worker(job: Job, pulse: Pulse) -> Outcome:
    """Rank 0 writes records to the run's folder and metrics to Prometheus."""
    if dist.get_rank() != 0:
        try:
            worker, saver, resumed, copier = _begin(job, pulse)
        except UserError as problem:
            return Outcome(0, problem=problem)
        report = worker.exported()
        return train(worker, resumed.step, report, saver, problem=lambda: _explained(job, saver.problem), copier=copier)
    tokens_per_step = job.train.batch * job.model.context
    telemetry = Telemetry(job.run.name, job.train.steps, tokens_per_step, restarts=_starts(job))
    run, spare = Run(job.run), folders.spare_records(job.id)
    if spare:
        records.restore(run.metrics, spare)
    with (
        telemetry,
        Trackers(run, job.train.trackers) as trackers,
        records.Writer(run.metrics, spare) as history,
        records.Writer(samples.path(run)) as continuations,
    ):
        try:
            worker, saver, resumed, copier = _begin(job, pulse)
        except UserError as problem:
            return Outcome(0, problem=problem)
        grids = Grids(run)
        report = _reporter(job, resumed, saver, telemetry, history, continuations, grids, trackers)
        exported = worker.exported()

        def report_all(record: Record) -> None:
            exported(record)
            report(record)

        def failure() -> UserError | None:
            return _explained(job, saver.problem or history.problem or continuations.problem or grids.problem)

        return train(worker, resumed.step, report_all, saver, telemetry.not_finite, failure, copier)


def _begin(job: Job, pulse: Pulse) -> tuple["Worker", Saver, Resumed, Copier | None]:
    _record_nodes(job)
    worker = Worker(job, pulse=pulse)
    failed = checkpoint_failures(job.run.name)
    saver = Saver(job.checkpoints, worker.engine, job.model, job.train, job.parallel, job.origin, failed)
    worker.prepare_reference()
    if worker.rank == 0:
        job.phase.unlink(missing_ok=True)
    metrics, every = Run(job.run).metrics, job.train.memory_copy_every
    begin = time.perf_counter()
    memory = agreement.find(job.id, job.origin, lambda: records.last_step(metrics)) if every else None
    resumed = saver.resume(
        job.verified, lambda: max(job.stored, records.last_saved(metrics)), in_memory=memory.whole if memory else None
    )
    resumed = replace(resumed, seconds=time.perf_counter() - begin)
    starting_weights.load(worker.engine, job.model, job.train, job.parallel, resumed.step)
    worker.continue_history(resumed.step)
    copier = memory.copier(worker.engine, job.model, job.parallel, job.origin, every) if memory else None
    return worker, saver, resumed, copier


def _record_nodes(job: Job) -> None:
    """Writes the nodes of all ranks, for the driver. Without the file it does not act on drain notices."""
    import ray

    if not ray.is_initialized():
        return
    ids: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(ids, ray.get_runtime_context().get_node_id())
    if dist.get_rank() == 0:
        with suppress(OSError):
            write_atomic(job.nodes, "\n".join(ids) + "\n")


def _explained(job: Job, error: OSError | None) -> UserError | None:
    return file_errors.explain(error, f"resume with: strata train --resume {job.run.name}") if error else None


def run_local(job: Job, report: Callable[[Record], None]) -> Outcome:
    """Trains without Ray and without checkpoints, in the caller's process group. For benchmarks and tests. Copies the state to
    memory only if the job has an id, whose folder the caller owns."""
    worker = Worker(job)
    starting_weights.load(worker.engine, job.model, job.train, job.parallel, 0)
    every = job.train.memory_copy_every
    memory = agreement.find(job.id, job.origin, lambda: 0) if every else None
    copier = memory.copier(worker.engine, job.model, job.parallel, job.origin, every) if memory else None
    return train(worker, 0, report if worker.rank == 0 else _silent, None, copier=copier)


def train(
    worker: "Worker",
    step: int,
    report: Callable[[Record], None],
    saver: Saver | None,
    not_finite: Callable[[], None] = lambda: None,
    problem: Callable[[], UserError | None] = lambda: None,
    copier: Copier | None = None,
) -> Outcome:
    """Trains from `step` to the last step or until a stop is requested. A non-finite loss or gradient norm ends the run before
    it can reach a checkpoint.

    A `problem` of one rank, such as a full disk, ends the run on all ranks at the same step. It is also checked before a save: a
    checkpoint after the last recorded step would leave a permanent hole in the run's history."""
    with Profiler(worker) as profiler:
        return _train(worker, step, report, saver, not_finite, problem, copier, profiler)


def _train(
    worker: "Worker",
    step: int,
    report: Callable[[Record], None],
    saver: Saver | None,
    not_finite: Callable[[], None],
    problem: Callable[[], UserError | None],
    copier: Copier | None,
    profiler: Profiler,
) -> Outcome:
    section = worker.job.train
    stall: float | None = None
    recent = spikes.Spikes(section.on_spike)
    if saver and section.steps == 0:
        saver.save(0, None, "sync")  # an import without training
    while step < worker.plan.steps:
        profiler.step(step + 1)
        begin = time.perf_counter()
        loss, request, failed = worker.step(step, problem() is not None)
        step += 1
        record = worker.record(step, loss, time.perf_counter() - begin)
        if copier:
            copier.measure(record)
        if stall is not None:  # caused by the save before this step
            record["checkpoint_stall_s"] = record["seconds"]["checkpoint"] = stall
            stall = None
        diverged = _not_finite(record)
        if diverged:
            not_finite()
        if (spike := recent.seen(record)) and worker.may_leave_out():
            worker.leave_out(step - 1, spike)
        if diverged:
            return Outcome(step, problem=diverged)
        if failed:
            return Outcome(step, problem=worker.agree(problem()))
        last, exhausted = request == Request.STOP or step == worker.plan.steps, False
        if last or step % section.eval_every == 0:
            worker.pulse.enter("evaluation")
            with profiler.range("evaluation"):
                record["val_loss"] = worker.evaluate()
                if section.distill:
                    record["distillation"] = worker.compared_with_teacher()
                if worker.job.prompts:
                    record["samples"] = worker.continuations(worker.job.prompts)
                if worker.job.pictures:
                    record["drawn"] = worker.draw(worker.job.pictures)
            exhausted = worker.early_stop.seen(record["val_loss"])
        last = last or exhausted
        report(record)
        if copier and not last:  # workers that continued from the last step would save no checkpoint of it
            copier.after_step(step)
        resized = request == Request.RESIZE and not last
        if saver and (last or resized or step % section.checkpoint_every == 0):
            if common := worker.agree(problem()):
                return Outcome(step, problem=common)
            worker.pulse.enter("checkpoint")
            with profiler.range("checkpoint"):
                stall = saver.save(step, record.get("val_loss"), "sync" if last or resized else section.checkpoint_upload)
            if (last or resized) and (common := worker.agree(problem())):
                return Outcome(step, problem=common)
        if resized:
            return Outcome(step, resized=True)
        if request == Request.STOP or exhausted:
            return Outcome(step, stopped=step < worker.plan.steps and not exhausted)
    return Outcome(step)


class Worker:
    """One rank: its engine and its data."""

    def __init__(self, job: Job, data: TrainingData | None = None, pulse: Pulse | None = None) -> None:
        self.job, self.pulse = job, pulse or Pulse()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.engine: Any = engine.build(job.model, job.train, job.parallel)
        self._watch = Stopwatch(torch.device(self.engine.device), self.pulse.enter)
        self._steps: Stages | Whole = (
            Stages(self.engine, self._watch)
            if job.parallel.pipeline > 1
            else (Flow if job.model.picture else Whole)(self.engine, job.model, job.parallel, self._watch)
        )
        self.data = data or training_data(job)
        self._peak = self._peak_flops() if self.rank == 0 else None
        self.plan = Plan.of(job.train)
        self.early_stop = EarlyStop(job.train.early_stop)
        self._budget: TimeBudget | None = None
        self._reference: ReferenceModel | None = None
        self._phase_due = 0.0
        self._loss = 0.0
        self._left_out = spikes.read(job.run)
        self._replicas = self._comparison()

    def _comparison(self) -> Comparison | None:
        """Comparison of replicas, if the layout has any. Hooks of compiled layers would compile them again."""
        train, parallel = self.job.train, self.job.parallel
        if (
            train.watchdog is None
            or not train.watchdog.check_every
            or parallel.zero == 3
            or parallel.data * parallel.sequence == 1
        ):
            return None
        every, here = (train.watchdog.check_every, train.checkpoint_every), place(self.rank, parallel)
        gradients = not train.compile and parallel.pipeline == 1
        return Comparison(
            self.engine, (here.stage, here.tensor), lambda step: any((step + 1) % each == 0 for each in every), gradients
        )

    def may_leave_out(self) -> bool:
        rule = self.job.train.on_spike
        return rule is not None and len(self._left_out) < rule.most

    def leave_out(self, step: int, reason: str) -> None:
        """Records that the batch of `step` is left out, and raises. Called by all ranks."""
        section, parallel = self.job.train, self.job.parallel
        losses_by_rank: list[float] = [0.0] * self.world
        dist.all_gather_object(losses_by_rank, self._loss)
        worst = max(range(self.world), key=lambda rank: (not math.isfinite(losses_by_rank[rank]), losses_by_rank[rank]))
        rows = np.split(self._order(step), parallel.data)[place(worst, parallel).data]
        documents = [name for row in rows.tolist() for name in self.data.train.places(row)]
        instead = section.steps + len(self._left_out)
        batch = spikes.LeftOut(step, instead, reason, tuple(documents[: spikes.MOST_DOCUMENTS]))
        if self.rank == 0:
            spikes.write(self.job.run, [*self._left_out, batch])
        dist.barrier()
        raise spikes.BatchLeftOut(batch.sentence())

    def _order(self, step: int) -> Indices:
        """Rows of all ranks at a step."""
        instead = {batch.step: batch.instead for batch in self._left_out}
        return self.data.order(instead.get(step, step), self.job.train.batch, 0, 1, self.job.train.seed)

    @property
    def watch(self) -> Stopwatch:
        return self._watch

    def continue_history(self, step: int) -> None:
        """Follows the time budget and the early stop from the records up to `step`. Called by all ranks; rank 0 reads."""
        train = self.job.train
        if train.time_budget_s is None and train.early_stop is None:
            return
        found: list[tuple[Plan, float, EarlyStop]] = [(self.plan, 0.0, self.early_stop)]
        if self.rank == 0:
            history = [record for record in records.read(Run(self.job.run).metrics) if record["step"] <= step] if step else []
            last = history[-1] if history and history[-1]["step"] == step else None
            found = [(*recorded(last, train), EarlyStop.after(train.early_stop, history))]
        dist.broadcast_object_list(found, 0)
        self.plan, spent, self.early_stop = found[0]
        if self.rank == 0 and train.time_budget_s is not None:
            self._budget = TimeBudget(train, spent)

    def step(self, step: int, failed: bool = False) -> tuple[float, Request, bool]:
        """Runs a step. Returns the mean loss over all ranks, the driver's request, and whether any rank `failed` to write. One
        small all-reduce carries these three, and the number of steps that rank 0 plans."""
        section, parallel = self.job.train, self.job.parallel
        self._seed_dropout(step)
        rate = learning_rate(step, section, self.plan)
        engine.set_learning_rate(self.engine, rate)
        here = place(self.rank, parallel)
        everyone = self._order(step)
        mine = micro_batches(everyone, here.data, parallel.data, accumulation(section, parallel))
        divisor = self._divisor(self.data.train, everyone, len(mine))
        reference = self._reference_of("train", everyone)
        batches = self._batches(self.data.train, mine, divisor, reference=reference)
        if self._replicas:
            self._replicas.begin(step)
        loss = self._steps.train(batches, len(mine))
        if self._replicas:
            self._replicas.compare()
        self._loss = float(loss) if section.on_spike else 0.0
        if section.flow:
            self.engine.average.update(step)
        request = self.job.request() if self.rank == 0 else Request.NONE
        steps = self._budget.finished(step + 1, self.plan).steps if self._budget else 0
        # float64: an fp32 number of steps would be inexact beyond 16 million
        sums = torch.cat([loss.reshape(1).double(), loss.new_tensor([request, failed, steps], dtype=torch.float64)])
        dist.all_reduce(sums)
        mean, request_sum, failed_sum, steps = sums.tolist()
        if steps and steps != self.plan.steps:
            self.plan = self.plan.revised(step + 1, int(steps))
        return mean / self.world, Request(int(request_sum)), failed_sum > 0

    def _seed_dropout(self, step: int) -> None:
        """Adapters' dropout depends on seed and step, so a resumed run repeats it. Tensor-parallel ranks drop the same."""
        if self.job.train.lora and self.job.train.lora.dropout:
            here = place(self.rank, self.job.parallel)
            torch.manual_seed(hash((self.job.train.seed, step, here.stage, here.data, here.sequence)))

    def exported(self) -> Callable[[Record], None]:
        """Exports this rank's time of a step, to find a slow rank."""
        return rank_seconds(self.job.run.name, self.rank, place(self.rank, self.job.parallel).stage)

    def agree(self, problem: UserError | None) -> UserError | None:
        """The problem of the lowest rank that has one. Called by all ranks."""
        problems: list[UserError | None] = [None] * self.world
        dist.all_gather_object(problems, problem)
        return next(filter(None, problems), None)

    def record(self, step: int, loss: float, seconds: float) -> Record:
        norm = self.engine.get_global_grad_norm()
        rate = self.job.train.batch * self.job.model.context / seconds
        phases = self._watch.read()
        self.pulse.stepped(step, phases.get("data", 0.0) + phases.get("forward", 0.0))
        record = Record(
            step=step,
            loss=loss,
            lr=self.engine.optimizer.param_groups[0]["lr"],
            grad_norm=None if norm is None else float(norm),
            tokens_per_s=rate,
            time=time.time(),
            seconds=phases,
            peak_memory_bytes=peak_memory(torch.device(self.engine.device)),
            workers=self.world,
            layout=described(self.job.parallel),
        )
        if self.job.model.picture:
            record["pictures_per_s"] = self.job.train.batch / seconds
        if self.job.train.preference:
            record["preference"] = self._preference_metrics()
        if self._budget:
            record["plan"] = to_record(self.plan, self._budget.spent, self.job.train)
        mfu = flops.mfu(rate, flops.flops_per_token(self.job.model, self.job.train.lora is not None), self.world, self._peak)
        if mfu is not None:
            record["mfu"] = mfu
        return record

    def _preference_metrics(self) -> dict[str, float]:
        """Accuracy, rewards and margin of the last step, over all ranks, and KTO's reference point."""
        objective = self.engine.preference
        sums = objective.take_sums().to(self.engine.device)
        dist.all_reduce(sums)
        return losses.means(sums) | ({} if objective.kl is None else {"kl": float(objective.kl)})

    def _peak_flops(self) -> float | None:
        """Peak FLOP/s of a device. Measured on rank 0 while the other ranks wait: on a laptop they share its cores."""
        parallel = self.job.parallel
        return flops.peak_flops(parallel.device, self.job.train.precision, parallel.cpus_per_worker)

    def evaluate(self) -> float:
        """Validation loss."""
        rows = self.data.validation
        indices = rows.evenly(self.job.train.eval_sequences)
        mean, _ = self.run_rows(rows, indices, self._reference_of("validation", indices))
        total = mean.clone()
        dist.all_reduce(total)
        self._watch.read()  # discards the evaluation's time, which is not part of the next step
        return float(total.item()) / self.world

    def compared_with_teacher(self) -> dict[str, float]:
        """Divergence from the teacher and agreement with it in the last evaluation, over all ranks."""
        sums = self.engine.distillation.take_sums().to(self.engine.device)
        dist.all_reduce(sums)
        return distillation.means(sums)

    def continuations(self, prompts: Prompts) -> list[list[int]]:
        """Greedy continuations of prompts. All ranks generate them together. Ranks with the same weights may round differently,
        so the first of them decides on each token."""
        parallel, device = self.job.parallel, torch.device(self.engine.device)
        here = place(self.rank, parallel)
        local: NextTokens
        if isinstance(self._steps, Stages):
            packed = self.data.train.read(np.zeros(1, np.int64)).positions is not None
            local = partial(self._steps.next_tokens, rows=self.job.train.micro_batch, positions=packed)
            multiple = self.job.model.context
        else:
            local, multiple = self._steps.next_tokens, math.lcm(samples.PAD_TO, parallel.sequence)

        def agreed(tokens_bt: torch.Tensor, last_b: torch.Tensor) -> torch.Tensor:
            next_b = local(tokens_bt, last_b)
            if here.data or here.tensor:
                next_b = torch.full_like(next_b, -1)
            dist.all_reduce(next_b, dist.ReduceOp.MAX)
            return next_b

        context = self.job.model.context
        found = samples.generate(agreed, prompts.ids, prompts.tokens, prompts.ends, context, multiple=multiple, device=device)
        self._watch.read()  # discards this time, as that of the evaluation
        return found

    def draw(self, prompts: PicturePrompts) -> list[Any]:
        """Pictures of captions by the averaged weights. Rank 0 draws them while the others wait: the model is whole there."""
        flow = self.job.train.flow
        assert flow
        whole = weight_average.gather(self.engine, self.job.model, self.job.parallel)
        pictures: list[Any] = []
        if self.rank == 0:
            model = whole_model(whole, self.job.model).to(self.engine.device)
            seeds = range(len(prompts.captions))
            pictures = sample(model, prompts.tokens, prompts.empty, seeds, flow.sample_steps, flow.guidance)
        self._watch.read()  # discards this time, as that of the evaluation
        return pictures

    def run_rows(
        self, rows: Rows, indices: Indices, reference: Reference | None, progress: Callable[[int], None] = lambda _: None
    ) -> tuple[torch.Tensor, Indices]:
        """Mean loss of this rank's share of rows without training on them, and which rows these are. All ranks run the same
        number of forward passes; padding has ignored targets."""
        section, parallel = self.job.train, self.job.parallel
        per_round = parallel.data * section.micro_batch
        rounds = math.ceil(len(indices) / per_round)
        if parallel.schedule == "dualpipev":  # evaluates in whole steps
            rounds = math.ceil(rounds / accumulation(section, parallel)) * accumulation(section, parallel)
        padded = np.resize(indices, rounds * per_round)
        counts = np.arange(len(padded)) < len(indices)
        mine = slice(place(self.rank, parallel).data, None, parallel.data)
        divisor = self._divisor(rows, indices, rounds)
        batches = self._batches(rows, np.split(padded[mine], rounds), divisor, np.split(counts[mine], rounds), reference)

        def counted() -> Batches:
            for number, batch in enumerate(batches):
                progress(min(number * per_round, len(indices)))
                yield batch

        return self._steps.evaluate(counted(), rounds), padded[mine][counts[mine]]

    def logprobs(
        self, rows: Rows, indices: Indices, progress: Callable[[int], None] = lambda _: None
    ) -> tuple[list[torch.Tensor], Indices]:
        """Log-probabilities of the documents in this rank's share of rows, and which rows these are. A rank without an output
        layer has no log-probabilities."""
        objective = self.engine.preference
        objective.collecting, objective.collected = True, []
        try:
            _, mine = self.run_rows(rows, indices, None, progress)
        finally:
            objective.collecting = False
        return objective.collected, mine

    def _reference_of(self, split: Split, indices: Indices) -> Reference | None:
        """Log-probabilities under the reference model. Sets KTO's reference point for a pass over the rows `indices`, which are
        those of all ranks."""
        if self._reference is None:
            return None
        self.engine.preference.kl = self._reference.kl(split, indices, self)
        return self._reference.values[split].of

    def _divisor(self, rows: Rows, indices: Indices, micro_batches: int) -> float:
        """Denominator of a micro-batch's loss. Sequence-parallel ranks have a share of the tokens, but all answers."""
        parallel, preference = self.job.parallel, self.job.train.preference
        if preference and isinstance(rows, finetuning_rows.Rows):
            return losses.loss_count(preference, len(rows.documents(indices))) / (micro_batches * parallel.data)
        return mean_divisor(rows, indices, micro_batches * parallel.data * parallel.sequence)

    def prepare_reference(self) -> None:
        """Finds or computes the reference model's log-probabilities for preference data. Called before a checkpoint is loaded."""
        job, preference = self.job, self.job.train.preference
        if preference is None or not preference.needs_reference:
            return
        assert job.model.source
        weights = pretrained.weights_digest(pretrained.resolve(job.model.source))
        if job.train.lora and job.train.lora.base != "full":  # the reference model is as the run holds it
            weights += f"-{job.train.lora.base}"
        self._reference = ReferenceModel(job.tokens, weights, job.model, job.train)
        if missing := self._reference.missing_rows():
            starting_weights.load(self.engine, job.model, job.train, job.parallel, 0)
            for values, rows in missing:
                values.complete(rows, self, job.parallel, partial(self._report_reference, values.split))

    def _report_reference(self, split: str, done: int, total: int) -> None:
        """Writes how far the reference pass is, for the driver. A failed write does not matter."""
        if self.rank == 0 and time.monotonic() >= self._phase_due:
            self._phase_due = time.monotonic() + PHASE_EVERY_S
            with suppress(OSError):
                write_atomic(self.job.phase, f"reference model: {done:,} of {total:,} rows ({split})")

    def _batches(
        self,
        rows: Rows,
        batches: list[Indices],
        divisor: float,
        counts: list[Any] | None = None,
        reference: Reference | None = None,
    ) -> Batches:
        for number, indices in enumerate(batches):
            with self._watch.phase("data"):
                read = rows.read(indices)
                tokens, targets, positions = (
                    None if values is None else on_device(values, torch.device(self.engine.device))
                    for values in (read.tokens, read.targets, read.positions)
                )
                assert tokens is not None and targets is not None
                if counts is not None:
                    targets = targets.clone()
                    targets[~torch.from_numpy(counts[number])] = IGNORED
                answers = None
                if self.job.train.preference:
                    now = None if counts is None else counts[number]
                    answers = answers_of(read, indices, reference, torch.device(self.engine.device), now)
                pictures = None
                if drawn := read.pictures:
                    arrays = (drawn.pixels, drawn.noise, drawn.times)
                    pictures = Pictures(*(on_device(array, torch.device(self.engine.device)) for array in arrays))
            distilled = self.job.train.distill is not None
            yield Batch(tokens, targets, positions, divisor, answers, pictures, distilled)


def _not_finite(record: Record) -> UserError | None:
    for key, value in (("loss", record["loss"]), ("gradient norm", record["grad_norm"])):
        if value is not None and not math.isfinite(value):
            fix = "Lower train.lr or raise train.warmup, and resume from the last checkpoint with --resume."
            return UserError(f"The {key} is {value} at step {record['step']}.", fix)
    return None


def _starts(job: Job) -> int:
    return len(job.starts.read_text().splitlines()) if job.starts.exists() else 0


def _reporter(
    job: Job,
    resumed: Resumed,
    saver: Saver,
    telemetry: Telemetry,
    history: records.Writer,
    continuations: records.Writer,
    grids: Grids,
    trackers: Trackers,
) -> Callable[[Record], None]:
    step = resumed.step
    records.cut(Run(job.run).metrics, step)
    samples.cut(Run(job.run), step)
    picture_progress.cut(Run(job.run), step)
    named = job.prompts.decoder() if job.prompts else None
    restarted = _starts(job) > 0
    with job.starts.open("a") as starts:
        starts.write(f"{step} {resumed.source}\n")
    if saver.last:
        telemetry.saved(saver.last.step, saver.last.size, saver.last.at)

    def report(record: Record) -> None:
        if restarted and record["step"] == step + 1:
            record["resumed"] = asdict(resumed)
        if saver.last:
            telemetry.saved(saver.last.step, saver.last.size, saver.last.at)
            record["checkpoint_step"] = saver.last.step
            if saver.last.seconds is not None:
                record["checkpoint_s"] = saver.last.seconds
        texts = named(record.pop("samples")) if named and "samples" in record else {}
        if texts:
            continuations.append(*samples.lines(record["step"], texts))
            continuations.flush()  # before the record, with which the driver reads them
        if (drawn := record.pop("drawn", None)) and (name := grids.write(record["step"], drawn)):
            record["picture"] = name
        history.append(record)
        # A run resumed from a checkpoint needs all records before it; the last step of a run has a validation loss.
        if record["step"] % job.train.checkpoint_every == 0 or "val_loss" in record:
            history.flush()
        telemetry.record(record)
        trackers.record(record, texts)

    return report


def _silent(_: Record) -> None:
    """`report` of ranks other than 0: records already cover all ranks."""
