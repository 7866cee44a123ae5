"""Baseline training loop in plain torch: DDP, fused AdamW, gradient clipping, a learning rate schedule.

The recipe decides everything that affects the amount of work: data and their order, schedule, clipping, weight decay. In bf16
the loop does what DeepSpeed does: parameters and gradients in bf16, and an fp32 copy for the optimizer. It stores all
activations and shards nothing, which is faster where it fits.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from strata.platform.recipe import Recipe, TrainSection
from strata.training.batch import Batch
from strata.training.bench.contest import Job, accumulation
from strata.training.data.rows import TrainingData, mean_divisor
from strata.training.memory import peak_memory
from strata.training.metrics.records import Record
from strata.training.schedule.learning_rate import learning_rate


def train(module: nn.Module, job: Job, data: TrainingData, device: torch.device, report: Callable[[Record], None]) -> None:
    """Trains `module`, whose forward pass returns the loss of a batch's tokens, targets, positions and count."""
    recipe, section = job.recipe, job.recipe.train
    model = module if dist.get_world_size() == 1 else DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = MasterAdamW(module, section)
    for step in range(section.steps):
        begin = time.perf_counter()
        rate = learning_rate(step, section)
        loss = _backward(model, list(_micro_batches(data, recipe, step, device)))
        norm = optimizer.step(rate)
        dist.all_reduce(loss)
        record = Record(
            step=step + 1,
            loss=loss.item() / dist.get_world_size(),
            lr=rate,
            grad_norm=norm.item(),
            tokens_per_s=section.batch * recipe.model.context / (time.perf_counter() - begin),
            time=time.time(),
            peak_memory_bytes=peak_memory(device),
        )
        report(record)


def _micro_batches(data: TrainingData, recipe: Recipe, step: int, device: torch.device) -> Iterator[Batch]:
    rank, world, section = dist.get_rank(), dist.get_world_size(), recipe.train
    count = mean_divisor(data.train, data.order(step, section.batch, 0, 1, section.seed), accumulation(recipe) * world)
    for part in np.split(data.order(step, section.batch, rank, world, section.seed), accumulation(recipe)):
        rows = data.train.read(part)
        tokens, targets = torch.from_numpy(rows.tokens).to(device), torch.from_numpy(rows.targets).to(device)
        positions = None if rows.positions is None else torch.from_numpy(rows.positions).to(device)
        yield Batch(tokens, targets, positions, count)


def _backward(model: nn.Module, micro_batches: list[Batch]) -> Tensor:
    """Mean loss of the step. Gradients accumulate locally; only the last micro-batch's backward pass runs the all-reduce."""
    losses = []
    for number, batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
            loss = model(batch.tokens_bt, batch.targets_bt, batch.positions_bt, batch.count) / len(micro_batches)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


class MasterAdamW:
    """Fused AdamW with fp32 master weights. fp32 parameters are their own master weights."""

    def __init__(self, module: nn.Module, train: TrainSection) -> None:
        self._clip = train.clip
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._parameters]
        groups = parameter_groups(module, dict(zip(self._parameters, self._masters, strict=True)), train)
        self._adamw = torch.optim.AdamW(groups, lr=train.lr, betas=(0.9, 0.95), fused=True)

    def step(self, rate: float) -> Tensor:
        """Returns the gradient norm before clipping."""
        for group in self._adamw.param_groups:
            group["lr"] = rate * group["ratio"]
        copied = [pair for pair in zip(self._parameters, self._masters, strict=True) if pair[0] is not pair[1]]
        for parameter, master in copied:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self._masters, self._clip)
        self._adamw.step()
        self._adamw.zero_grad()
        with torch.no_grad():
            for parameter, master in copied:
                parameter.copy_(master)
        return norm


def parameter_groups(module: nn.Module, masters: dict[nn.Parameter, nn.Parameter], train: TrainSection) -> list[dict[str, Any]]:
    """Same parameter groups as `strata.training.engine`: only the layers' matrices decay, and embeddings have their own
    learning rate. Parameters are recognized by names that Strata's and Hugging Face's models share."""
    named = [(name, masters[parameter]) for name, parameter in module.named_parameters() if parameter.requires_grad]
    tables = [p for name, p in named if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    norms = [p for _, p in named if p.dim() < 2]
    matrices = [p for name, p in named if ".layers." in name and p.dim() >= 2]
    assert len(tables) + len(norms) + len(matrices) == len(named)
    return [
        {"params": matrices, "weight_decay": train.weight_decay, "ratio": 1.0},
        {"params": tables, "weight_decay": 0.0, "ratio": train.embedding_lr_ratio},
        {"params": norms, "weight_decay": 0.0, "ratio": 1.0},
    ]
