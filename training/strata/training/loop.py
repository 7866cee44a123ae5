"""What each Ray Train worker runs.

Nothing in the loop draws random numbers: the order of the data is a function of seed and step, and the model has no dropout.
So the state to save is the engine's and the step, and a resumed run repeats the uninterrupted one exactly.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.platform.runs import Run
from strata.training import checkpoint, engine, records
from strata.training.model import token_losses
from strata.training.sampler import Indices, step_indices
from strata.training.schedule import learning_rate
from strata.training.windows import Windows


@dataclass(frozen=True)
class Job:
    """All that a worker is told. Paths are absolute, on storage that all workers share."""

    run: Path
    tokens: Path
    model: ModelSection
    train: TrainSection
    parallel: ParallelSection

    @property
    def stop(self) -> Path:
        """The driver asks for a stop by making this file: Ray has no other message to running workers."""
        return self.run / "stop"

    @property
    def origin(self) -> checkpoint.Origin:
        return checkpoint.Origin(self.model.model_dump(), self.tokens.name, self.parallel.workers, self.parallel.zero)


@dataclass(frozen=True)
class Outcome:
    """A problem that would come again is returned, not raised: Ray answers an exception by restarting the workers."""

    step: int
    stopped: bool = False
    problem: UserError | None = None


def train_worker(config: dict[str, Job]) -> Outcome:
    worker = Worker(config["job"])
    train, step = worker.job.train, worker.resume()
    while step < train.steps:
        begin = time.perf_counter()
        loss, stop = worker.step(step)
        step += 1
        if not math.isfinite(loss):
            fix = "Lower train.lr or raise train.warmup, and go on from the last checkpoint with --resume."
            return Outcome(step, problem=UserError(f"The loss is {loss} at step {step}.", fix))
        last = stop or step == train.steps
        worker.record(step, loss, time.perf_counter() - begin, evaluate=last or step % train.eval_every == 0)
        if last or step % train.checkpoint_every == 0:
            worker.save(step)
        if stop:
            return Outcome(step, stopped=step < train.steps)
    return Outcome(step)


class Worker:
    """One rank: its engine, its view of the data, and its place among the others."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.run = Run(job.run)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.engine: Any = engine.build(job.model, job.train, job.parallel)
        self.train_windows = Windows(job.tokens, "train", job.model.context)
        self.validation_windows = Windows(job.tokens, "validation", job.model.context)

    def resume(self) -> int:
        """From the newest good checkpoint, also when Ray has restarted the workers after a loss: the step it was saved at."""
        found = [checkpoint.newest(self.run.checkpoints, say=lambda _: None) if self.rank == 0 else None]
        dist.broadcast_object_list(found, src=0, device=self.engine.device)
        step = 0
        if found[0] is not None:
            checkpoint.load(self.engine, found[0])
            step = found[0].step
        if self.rank == 0:
            records.cut(self.run.metrics, step)
        return step

    def step(self, step: int) -> tuple[float, bool]:
        """The loss over all ranks, and whether rank 0 was asked to stop: one small reduction carries both."""
        train = self.job.train
        rate = learning_rate(step, train.steps, train.lr, train.warmup, train.min_lr_ratio)
        engine.set_learning_rate(self.engine, rate)
        indices = step_indices(step, train.batch, self.rank, self.world, len(self.train_windows), train.seed)
        total = torch.zeros((), device=self.engine.device)
        micro_batches = np.split(indices, engine.accumulation(train, self.job.parallel))
        for tokens_bt, targets_bt in self._batches(self.train_windows, micro_batches):
            loss = token_losses(self.engine(tokens_bt), targets_bt).mean()
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / len(micro_batches)
        asked = self.rank == 0 and self.job.stop.exists()
        loss_and_stop = torch.stack([total, total.new_tensor(float(asked))])
        dist.all_reduce(loss_and_stop)
        return loss_and_stop[0].item() / self.world, loss_and_stop[1].item() > 0

    def record(self, step: int, loss: float, seconds: float, evaluate: bool) -> None:
        train = self.job.train
        norm = self.engine.get_global_grad_norm()
        record = records.Record(
            step=step,
            loss=loss,
            lr=self.engine.optimizer.param_groups[0]["lr"],
            grad_norm=None if norm is None else float(norm),
            tokens_per_s=train.batch * self.job.model.context / seconds,
            time=time.time(),
        )
        if evaluate:
            record["val_loss"] = self.evaluate()
        if self.rank == 0:
            records.append(self.run.metrics, record)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Every rank runs as many forward passes as the others, on padding if need be: under ZeRO-3 each is a collective."""
        indices = self.validation_windows.evenly(self.job.train.eval_sequences)
        at_once = self.world * self.job.train.micro_batch
        rounds = math.ceil(len(indices) / at_once)
        padded = np.resize(indices, rounds * at_once)
        counts = torch.arange(len(padded), device=self.engine.device) < len(indices)
        mine = slice(self.rank, None, self.world)
        self.engine.eval()
        losses_b = [
            token_losses(self.engine(tokens_bt), targets_bt).mean(dim=1)
            for tokens_bt, targets_bt in self._batches(self.validation_windows, np.split(padded[mine], rounds))
        ]
        self.engine.train()
        total = (torch.cat(losses_b) * counts[mine]).sum()
        dist.all_reduce(total)
        return total.item() / len(indices)

    def save(self, step: int) -> None:
        checkpoint.save(self.engine, self.run.checkpoints, step, self.job.origin, self.job.train.keep)

    def _batches(self, windows: Windows, batches: list[Indices]) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in batches:
            tokens = torch.from_numpy(windows.read(indices)).to(self.engine.device)
            yield tokens[:, :-1], tokens[:, 1:]
