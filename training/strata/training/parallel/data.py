"""Data parallelism without ZeRO: gradients are summed over the workers in the memory that they share, on CPUs of one machine, and
elsewhere as soon as the backward pass has made them, while the pass goes on. DeepSpeed's own reduction begins when the pass is
over, and copies all gradients into a buffer and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata.platform.recipe import ParallelSection
from strata.training.parallel import shared_memory

BUCKET_BYTES = 25 << 20  # as torch's own DDP has them


def gradient_scale(parallel: ParallelSection) -> float:
    """What a worker's mean loss is multiplied by, for the gradients to come out as those of the whole batch's mean loss.
    Ours are sums. DeepSpeed's are means over data-parallel workers and sums over a sequence's slices, but with ZeRO-3 means."""
    if ours(parallel):
        return 1 / (parallel.data * parallel.sequence)
    return 1.0 if parallel.zero == 3 else 1 / parallel.sequence


def ours(parallel: ParallelSection) -> bool:
    """A pipeline's stages reduce when their schedule says so."""
    return parallel.zero == 0 and parallel.pipeline == 1


def attach(engine: Any) -> None:
    """By the method that DeepSpeed's engine calls to reduce gradients, on this engine alone."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in engine.module.parameters():
        groups.setdefault(_group(engine, parameter), []).append(parameter)
    shared = {group: parameters for group, parameters in groups.items() if dist.get_world_size(group) > 1}
    if all(parameter.device.type == "cpu" for parameter in engine.module.parameters()) and shared_memory.reachable(None):
        sums = [shared_memory.SharedSum(group, parameters, BUCKET_BYTES) for group, parameters in shared.items()]
        engine.buffered_allreduce_fallback = lambda grads, elements_per_buffer: shared_memory.add_up(sums)
    else:
        reduction = Reduction(engine)
        for parameter in engine.module.parameters():
            parameter.register_post_accumulate_grad_hook(reduction.made)
        engine.buffered_allreduce_fallback = lambda grads, elements_per_buffer: reduction.finish()


def _group(engine: Any, parameter: nn.Parameter) -> Any:
    """The workers that have this parameter: those of an expert are others than those of the rest."""
    if hasattr(parameter, "group_name"):
        return engine.expert_data_parallel_group[parameter.group_name]
    return engine.seq_data_parallel_group


class Reduction:
    """Gradients go into buckets in the order in which they are made, which is the same on every worker; a full bucket is on its
    way while the next one fills. The buckets' memory is kept, and gradients stay in it: they are copied once."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._to_come = self._parameters = len(list(engine.module.parameters()))
        self._filling: dict[Any, list[nn.Parameter]] = {}  # by group of workers
        self._sent: list[tuple[Any, list[nn.Parameter], Tensor]] = []
        self._buffers: list[Tensor] = []

    def made(self, parameter: nn.Parameter) -> None:
        if not self._engine.is_gradient_accumulation_boundary():
            return
        group = _group(self._engine, parameter)
        bucket = self._filling.setdefault(group, [])
        bucket.append(parameter)
        self._to_come -= 1
        if sum(p.nbytes for p in bucket) >= BUCKET_BYTES:
            self._send(group)
        if self._to_come == 0:
            for other in list(self._filling):
                self._send(other)

    def finish(self) -> None:
        for work, parameters, buffer in self._sent:
            work.wait()
            for parameter, values in zip(parameters, torch.split(buffer, [p.numel() for p in parameters]), strict=True):
                parameter.grad = values.view_as(parameter)
        self._sent.clear()
        self._to_come = self._parameters

    def _send(self, group: Any) -> None:
        parameters = self._filling.pop(group)
        if dist.get_world_size(group) == 1:
            return
        gradients = [parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None]
        if len(self._buffers) == len(self._sent):
            self._buffers.append(torch.cat(gradients))
        buffer = torch.cat(gradients, out=self._buffers[len(self._sent)])
        self._sent.append((dist.all_reduce(buffer, group=group, async_op=True), parameters, buffer))
