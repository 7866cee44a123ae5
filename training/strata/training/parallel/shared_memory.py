"""All-reduce of gradients in shared memory, for workers on the CPUs of one machine.

gloo sends gradients through the loopback interface, which takes a quarter of the laptop recipe's step.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def reachable(group: Any) -> bool:
    """True if the group's workers can open each other's files: they share a kernel, a PID namespace and a user."""
    proc = Path("/proc")
    if not proc.exists():  # not Linux
        return False
    machine = ((proc / "sys/kernel/random/boot_id").read_text(), str((proc / "self/ns/pid").readlink()), os.getuid())
    machines = [machine] * dist.get_world_size(group)
    dist.all_gather_object(machines, machine, group)
    return len(set(machines)) == 1


class SharedSum:
    """Sum over one shared buffer per worker. A worker copies its gradients to its buffer, waits for the others, and sums all
    buffers into its gradients, in the order of the ranks, so that all workers get the same. The memory is an unnamed file, so a
    worker that dies leaves nothing behind.

    Gradients are reduced in buckets of `bucket_bytes`, so the buffers do not grow with the model. Buckets alternate between two
    sets of buffers: a worker that waits for the others at one bucket has read the one before, whose buffers may then be
    overwritten. So a bucket needs a single barrier.
    """

    def __init__(self, group: Any, parameters: list[nn.Parameter], bucket_bytes: int) -> None:
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._buckets = list(_buckets(parameters, bucket_bytes))
        size = max(sum(p.numel() for p in bucket) for bucket in self._buckets)
        self._buffers = _shared_tensor(group, 2 * self._world * size, parameters[0].dtype).view(2, self._world, size)
        self._set = 0

    def all_reduce(self) -> None:
        """Replaces the gradients by their sums."""
        for bucket in self._buckets:
            gradients = [p.grad.view(-1) for p in bucket if p.grad is not None]
            assert len(gradients) == len(bucket), "the backward pass reaches every parameter"
            sizes = [gradient.numel() for gradient in gradients]
            buffers = self._buffers[self._set, :, : sum(sizes)]
            self._set = 1 - self._set
            torch.cat(gradients, out=buffers[self._rank])
            dist.barrier(self._group)
            first, *others = ([*buffer.split(sizes)] for buffer in buffers)
            torch._foreach_copy_(gradients, first)
            for other in others:
                torch._foreach_add_(gradients, other)


def all_reduce(sums: Iterable[SharedSum]) -> None:
    for each in sums:
        each.all_reduce()


def _buckets(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Groups parameters into buckets. Gradients are not split: a bucket holds at least one, even if it is larger."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > bucket_bytes:
            yield bucket
            bucket = []
        bucket.append(parameter)
    yield bucket


def _shared_tensor(group: Any, elements: int, dtype: torch.dtype) -> Tensor:
    """Tensor in an unnamed file of the first rank. The others open the file through that process's /proc/<pid>/fd."""
    first = dist.get_global_rank(group, 0)
    place: list[str | None] = [None]
    file = None
    if dist.get_rank() == first:
        file = os.memfd_create("strata-gradients")
        os.ftruncate(file, elements * dtype.itemsize)
        place = [f"/proc/{os.getpid()}/fd/{file}"]
    dist.broadcast_object_list(place, src=first, group=group)
    assert place[0] is not None
    tensor = torch.from_file(place[0], shared=True, size=elements, dtype=dtype)
    dist.barrier(group)
    if file is not None:
        os.close(file)
    return tensor
