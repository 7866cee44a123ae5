"""Training without Ray and DeepSpeed, for tests of file and disk faults.

All code that reads or writes files is real: the command line, the driver, the training loop, the records, the saver and its
checkpoints, the export. Only the engine is a stand-in: weights with the right names and shapes, updated by a rule in which each
step depends on the previous one. So a lost, repeated or wrong step changes every later loss.
"""

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import Tensor

from strata.platform import cli
from strata.platform.runs import Run
from strata.training import driver, loop
from strata.training.interrupts import Interrupts
from strata.training.loop import Job, Outcome, Request
from strata.training.metrics import records
from strata.training.metrics.records import Record
from strata.training.model.llama import Llama
from strata.training.parallel import optimizer_state
from strata.training.parallel.optimizer_state import Fragment
from strata.training.parallel.shard_map import Shard
from strata.training.schedule.early_stop import EarlyStop
from strata.training.schedule.learning_rate import Plan
from strata.training.watchdog.pulse import Pulse

from .plain import scheduled_rate


class StandIn:
    """Stand-in for `loop.Worker` that is its own engine."""

    hooks: ClassVar[dict[int, Any]] = {}  # functions to call during a run, by step

    def __init__(self, job: Job, pulse: Pulse) -> None:
        self.job, self.pulse, self.rank, self.world = job, pulse, 0, 1
        torch.manual_seed(0)
        named = Llama(job.model, 0, "torch").named_parameters()
        self.weights: dict[str, Tensor] = {name: weight.detach().clone() for name, weight in named}
        self.engine = self
        self.plan = Plan.of(job.train)
        self.early_stop = EarlyStop(job.train.early_stop)

    def prepare_reference(self) -> None:
        """Without preferences there is no reference model."""

    def exported(self) -> Callable[[Record], None]:
        """Without Ray there is nowhere to export a rank's time."""
        return lambda record: None

    def continue_history(self, step: int) -> None:
        """Without a time budget there is nothing to continue."""

    def step(self, step: int, failed: bool = False) -> tuple[float, Request, bool]:
        section = self.job.train
        rate = scheduled_rate(step, section)
        for weight in self.weights.values():
            weight.mul_(1 - rate).add_(math.sin(step) * rate)
        if hook := self.hooks.get(step + 1):
            hook()
        return float(sum(weight.abs().mean() for weight in self.weights.values())), self.job.request(), failed

    def record(self, step: int, loss: float, seconds: float) -> Record:
        return Record(step=step, loss=loss, lr=0.1, grad_norm=1.0, tokens_per_s=1.0, time=time.time(), seconds={"forward": 0.1})

    def evaluate(self) -> float:
        return 2.5

    def agree(self, problem: Any) -> Any:
        return problem


def fragments(engine: StandIn, *_: object) -> Iterator[Fragment]:
    for name, weight in engine.weights.items():
        yield Fragment(Shard(name, tuple(weight.shape), None, 0), "weight", 0, weight.flatten())


def load(engine: StandIn, model: object, parallel: object, source: Any, step: int) -> None:
    engine.weights = {name: source.whole(name) for name in engine.weights}


def run_workers(job: Job, interrupts: Interrupts, console: Console) -> Outcome:
    job.starts.unlink(missing_ok=True)
    return loop.train_worker({"job": job})


def without_ray(patch: pytest.MonkeyPatch) -> None:
    def report(metrics: dict[str, Any], *, checkpoint_dir_name: str, checkpoint_upload_fn: Any, **_: Any) -> None:
        checkpoint_upload_fn(None, checkpoint_dir_name)

    def gather(into: list[Any], one: Any) -> None:
        into[0] = one

    storage = SimpleNamespace(get_storage=lambda: SimpleNamespace(storage_filesystem=None))
    patch.setattr("ray.train.report", report)
    patch.setattr("ray.train.get_context", lambda: storage)
    patch.setattr("ray.train.Checkpoint", lambda path, filesystem: path)
    patch.setattr("torch.distributed.get_rank", lambda: 0)
    patch.setattr("torch.distributed.get_world_size", lambda: 1)
    patch.setattr("torch.distributed.barrier", lambda: None)
    patch.setattr("torch.distributed.all_gather_object", gather)
    patch.setattr(loop, "Worker", StandIn)
    patch.setattr(optimizer_state, "fragments", fragments)
    patch.setattr(optimizer_state, "load", load)
    patch.setattr(driver, "run_workers", run_workers)
    patch.setattr(driver, "plot_losses", lambda *_: None)  # takes seconds and is not tested here
    patch.setattr(StandIn, "hooks", {})


def strata(*words: str) -> int:
    """Runs the command line in this process and returns its exit status. Raises an error that would print a traceback."""
    before, sys.argv = sys.argv, ["strata", *words]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def losses(run: Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records.read(run.metrics)]


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
