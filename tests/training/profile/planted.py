"""Performance faults, planted into real runs of the training loop on CPU ranks."""

import gc
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import module as deepspeed_pipeline
from torch import Tensor

from strata.platform.recipe import Recipe
from strata.training import loop
from strata.training.checkpoint import format
from strata.training.checkpoint.storage import folder
from strata.training.loop import Job, Worker
from strata.training.model import attention
from strata.training.model.llama import Layer
from strata.training.model.ops import sees
from strata.training.parallel import optimizer_state
from strata.training.profile import request
from strata.training.profile.request import Request

from ..parallel.ranks import on_ranks

FIRST, LAST = 3, 8  # steps to profile
MODEL = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 768, "vocab": 512, "context": 256}
TRAIN = {"steps": LAST + 1, "batch": 4, "micro_batch": 2, "warmup": 1, "eval_every": 100, "checkpoint_every": 100, "clip": 1.0}


@dataclass(frozen=True)
class Case:
    """A run with a fault, and the cause that a profile must name first; None for a run without a fault."""

    cause: str | None
    plant: Callable[[Worker], None] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    parts: tuple[int, ...] = ()  # first layer of each stage, and the end
    saves: bool = False

    def recipe(self, recipe: Recipe) -> Recipe:
        parallel = {"workers": 1, "zero": 0, "cpus_per_worker": 1} | self.parallel
        return recipe.model_copy(
            update={
                "model": recipe.model.model_copy(update=MODEL | self.model),
                "train": recipe.train.model_copy(update={"time_budget_s": None} | TRAIN | self.train),
                "parallel": type(recipe.parallel)(**(recipe.parallel.model_dump() | parallel)),
            }
        )


@dataclass
class SlowSaver:
    """Saves all state before the next step, without Ray."""

    worker: Worker

    def save(self, step: int, val_loss: float | None, mode: Literal["async", "sync"]) -> float:
        begin, job, engine = time.perf_counter(), self.worker.job, self.worker.engine
        parts = [replace(p, values=p.values.cpu()) for p in optimizer_state.fragments(engine, job.model, job.parallel)]
        target = folder(job.run / "saved" / str(step))
        format.write(target, self.worker.rank, self.worker.world, step, job.origin, None, parts)
        return time.perf_counter() - begin


def profile(recipe: Recipe, tokens: Path, run: Path, name: str) -> Path:
    """Trains with the fault and returns the folder of the traces."""
    wanted = Request("planted", FIRST, LAST)
    request.write(run, wanted)
    job = Job(run, tokens, recipe.model, recipe.train, recipe.parallel)
    on_ranks(recipe.parallel.workers, train_on_this_rank, job, name)
    return wanted.folder(run)


def train_on_this_rank(job: Job, name: str) -> None:
    case = CASES[name]
    torch.set_num_threads(job.parallel.cpus_per_worker)
    with _partition(case.parts) if case.parts else nullcontext():
        worker = Worker(job)
    if case.plant:
        case.plant(worker)
    saver: Any = SlowSaver(worker) if case.saves else None
    outcome = loop.train(worker, 0, lambda record: None, saver)
    assert outcome.problem is None
    dist.barrier()


def _partition(parts: tuple[int, ...]) -> AbstractContextManager[Any]:
    return mock.patch.object(deepspeed_pipeline.ds_utils, "partition_balanced", lambda weights, num_parts: list(parts))


def slow_data(worker: Worker) -> None:
    rows = type(worker.data.train)
    read = rows.read

    def slow(self: Any, indices: Any) -> Any:
        time.sleep(0.1)
        return read(self, indices)

    rows.read = slow  # type: ignore[method-assign]


def slow_data_on_one_rank(worker: Worker) -> None:
    if worker.rank == 1:
        slow_data(worker)


def read_in_every_layer(worker: Worker) -> None:
    """Checks the median of each layer's output."""

    def after(layer: Any, inputs: Any, output: Tensor) -> None:
        if output.detach().flatten().sort().values[output.numel() // 2].item() > 1e9:
            raise ValueError("a layer's output is too large")

    for layer in worker.engine.module.modules():
        if isinstance(layer, Layer):
            layer.register_forward_hook(after)


def slow_rank(worker: Worker) -> None:
    """Rank 1 pauses as a throttled device does."""
    if worker.rank == 1:
        for layer in worker.engine.module.modules():
            if isinstance(layer, Layer):
                layer.register_forward_hook(lambda *_: time.sleep(0.03))


def late_reduction(worker: Worker) -> None:
    """Gradients in double precision, one after the other, when the backward pass is over."""
    parameters = [p for p in worker.engine.module.parameters() if p.requires_grad]

    def reduce(*_: Any, **__: Any) -> None:
        for parameter in parameters:
            whole = parameter.grad.double()
            for _ in range(4):
                dist.all_reduce(whole)
                whole /= worker.world
            parameter.grad = whole.float()

    worker.engine.buffered_allreduce_fallback = reduce


def flag_of_every_slice(worker: Worker) -> None:
    """Ranks agree on a flag for each slice of each layer's output."""

    def after(layer: Any, inputs: Any, output: Tensor) -> None:
        for columns in output.detach().chunk(32, dim=-1):
            dist.all_reduce(columns.isfinite().all().float())

    for layer in worker.engine.module.modules():
        if isinstance(layer, Layer):
            layer.register_forward_hook(after)


def garbage(worker: Worker) -> None:
    def after(*_: Any) -> None:
        gc.collect()

    for layer in worker.engine.module.modules():
        if isinstance(layer, Layer):
            layer.register_forward_hook(after)


def one_thread(worker: Worker) -> None:
    torch.set_num_threads(1)


def stored_scores(worker: Worker) -> None:
    def forward(self: Any, q_bthe: Tensor, k_btke: Tensor, v_btke: Tensor, *_: Any) -> Tensor:
        mask_ts = sees(q_bthe.shape[1], None, None, q_bthe.device)
        return attention.plain(q_bthe, k_btke, v_btke, mask_ts, 1 / math.sqrt(q_bthe.shape[-1]))

    attention.CausalAttention.forward = forward  # type: ignore[method-assign]


TWO = {"workers": 2}
STAGES = {"workers": 2, "pipeline": 2}
CASES = {
    "clean": Case(None),
    "clean_two_ranks": Case(None, parallel=TWO),
    "clean_pipeline": Case(None, model={"layers": 4}, train={"batch": 8, "micro_batch": 1}, parallel=STAGES),
    "slow_data": Case("data", slow_data),
    "slow_data_on_one_rank": Case("data", slow_data_on_one_rank, parallel=TWO),
    "read_in_every_layer": Case("host reads", read_in_every_layer),
    "slow_rank": Case("slow rank", slow_rank, parallel=TWO),
    "late_reduction": Case("collectives", late_reduction, parallel=TWO),
    "flag_of_every_slice": Case("collectives", flag_of_every_slice, parallel=TWO),
    "tiny_micro_batches": Case(
        "dispatch", model={"context": 32, "hidden": 64, "ffn": 128}, train={"batch": 16, "micro_batch": 1}
    ),
    "saves_every_step": Case("checkpoint", train={"checkpoint_every": 1}, saves=True),
    "few_micro_batches": Case("pipeline bubble", model={"layers": 4}, train={"batch": 2, "micro_batch": 1}, parallel=STAGES),
    "one_thread": Case("threads", one_thread, parallel={"cpus_per_worker": 2}),
    "garbage": Case("garbage collection", garbage),
    "uneven_stages": Case(
        "uneven stage", model={"layers": 4}, train={"batch": 8, "micro_batch": 1}, parallel=STAGES, parts=(0, 2, 7)
    ),
    "stored_scores": Case("unfused attention", stored_scores, model={"heads": 8, "kv_heads": 4, "ffn": 256}),
    "recomputes": Case("recomputation", train={"recompute": "full"}),
    "evaluates_every_step": Case("evaluation", train={"eval_every": 1, "eval_sequences": 8}),
}
