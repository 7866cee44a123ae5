"""Data parallelism without ZeRO, with gradient reduction that overlaps the backward pass.

On CPUs of one machine, gradients are summed in shared memory. Elsewhere buckets are all-reduced during the backward pass.
DeepSpeed's own reduction begins after the pass, and copies all gradients into a buffer and back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata.platform.recipe import ParallelSection
from strata.training.parallel import shared_memory

BUCKET_BYTES = 25 << 20  # as in torch's DDP


def gradient_scale(parallel: ParallelSection) -> float:
    """Factor for a worker's mean loss, so that gradients are those of the whole batch's mean loss. The reduction in this module
    sums. DeepSpeed averages over data-parallel ranks and sums over sequence-parallel ranks; with ZeRO-3 it averages over both."""
    if replaces_deepspeed(parallel):
        return 1 / (parallel.data * parallel.sequence)
    return 1.0 if parallel.zero == 3 else 1 / parallel.sequence


def replaces_deepspeed(parallel: ParallelSection) -> bool:
    """True if this module reduces gradients instead of DeepSpeed. A pipeline's schedule runs its own reduction."""
    return parallel.zero == 0 and parallel.pipeline == 1


def attach(engine: Any) -> None:
    """Replaces the method of this engine that reduces gradients."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in _trained(engine):
        groups.setdefault(_group(engine, parameter), []).append(parameter)
    shared = {group: parameters for group, parameters in groups.items() if dist.get_world_size(group) > 1}
    if all(parameter.device.type == "cpu" for parameter in engine.module.parameters()) and shared_memory.reachable(None):
        sums = [shared_memory.SharedSum(group, parameters, BUCKET_BYTES) for group, parameters in shared.items()]
        engine.buffered_allreduce_fallback = lambda grads, elements_per_buffer: shared_memory.all_reduce(sums)
    else:
        reduction = Reduction(engine)
        for parameter in _trained(engine):
            parameter.register_post_accumulate_grad_hook(reduction.add)  # type: ignore[no-untyped-call]
        engine.buffered_allreduce_fallback = lambda grads, elements_per_buffer: reduction.finish()


def _trained(engine: Any) -> list[nn.Parameter]:
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


def _group(engine: Any, parameter: nn.Parameter) -> Any:
    """Process group over which the gradient of this parameter is reduced: experts have their own."""
    if hasattr(parameter, "group_name"):
        return engine.expert_data_parallel_group[parameter.group_name]
    return engine.seq_data_parallel_group


class Reduction:
    """Bucketed all-reduce during the backward pass. Buckets fill in the order in which gradients are computed, which is the same
    on every worker; a full bucket is reduced while the next one fills. Buffers are reused, and gradients become views of them, so
    each gradient is copied once."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._remaining = self._parameters = len(_trained(engine))
        self._filling: dict[Any, list[nn.Parameter]] = {}  # by process group
        self._sent: list[tuple[Any, list[nn.Parameter], Tensor]] = []
        self._buffers: list[Tensor] = []

    def add(self, parameter: nn.Parameter) -> None:
        if not self._engine.is_gradient_accumulation_boundary():
            return
        group = _group(self._engine, parameter)
        bucket = self._filling.setdefault(group, [])
        bucket.append(parameter)
        self._remaining -= 1
        if sum(p.nbytes for p in bucket) >= BUCKET_BYTES:
            self._send(group)
        if self._remaining == 0:
            for other in list(self._filling):
                self._send(other)

    def finish(self) -> None:
        for work, parameters, buffer in self._sent:
            work.wait()
            for parameter, values in zip(parameters, torch.split(buffer, [p.numel() for p in parameters]), strict=True):
                parameter.grad = values.view_as(parameter)
        self._sent.clear()
        self._remaining = self._parameters

    def _send(self, group: Any) -> None:
        parameters = self._filling.pop(group)
        if dist.get_world_size(group) == 1:
            return
        gradients = [parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None]
        if len(self._buffers) == len(self._sent):
            self._buffers.append(torch.cat(gradients))
        buffer = torch.cat(gradients, out=self._buffers[len(self._sent)])
        self._sent.append((dist.all_reduce(buffer, group=group, async_op=True), parameters, buffer))
