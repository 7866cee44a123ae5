"""Gradients of workers that share a machine's memory, summed in it.

gloo, the library for CPUs, sends them through the loopback interface, which takes a quarter of the laptop recipe's step.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def reachable(group: Any) -> bool:
    """Whether the group's workers can open each other's files: the same kernel, and the same view of its processes."""
    proc = Path("/proc")
    if not proc.exists():  # not Linux
        return False
    machine = ((proc / "sys/kernel/random/boot_id").read_text(), str((proc / "self/ns/pid").readlink()), os.getuid())
    machines = [machine] * dist.get_world_size(group)
    dist.all_gather_object(machines, machine, group)
    return len(set(machines)) == 1


class SharedSum:
    """One desk per worker and one for the sum. A worker lays its gradients on its desk, adds up its part of all desks, and
    takes the sum back. The memory is that of one file, which has no name: nobody's death leaves it behind.

    A desk holds as many gradients as fit into `desk_bytes`, so that the memory does not grow with the model.
    """

    def __init__(self, group: Any, parameters: list[nn.Parameter], desk_bytes: int) -> None:
        self._group = group
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._loads = list(_loads(parameters, desk_bytes))
        desk = max(sum(p.numel() for p in load) for load in self._loads)
        self._desks = _shared_tensor(group, (self._world + 1) * desk, parameters[0].dtype).view(self._world + 1, desk)

    def add_up(self) -> None:
        """Nobody can read a desk before it is laid, nor lay it again before it is read: a worker comes to the first barrier
        with its own sum taken, and to the second with everybody's desk read."""
        for load in self._loads:
            gradients = [p.grad.view(-1) for p in load if p.grad is not None]
            assert len(gradients) == len(load), "the backward pass reaches every parameter"
            desks = self._desks[:, : sum(g.numel() for g in gradients)]
            torch.cat(gradients, out=desks[self._rank])
            dist.barrier(self._group)
            *parts, total = desks.tensor_split(self._world, dim=1)[self._rank]
            torch.add(parts[0], parts[1], out=total)
            for part in parts[2:]:
                total += part
            dist.barrier(self._group)
            torch._foreach_copy_(gradients, torch.split(desks[-1], [g.numel() for g in gradients]))


def add_up(sums: Iterable[SharedSum]) -> None:
    for each in sums:
        each.add_up()


def _loads(parameters: Iterable[nn.Parameter], desk_bytes: int) -> Iterator[list[nn.Parameter]]:
    """A gradient is not cut: one that is larger than the desk makes it larger."""
    load: list[nn.Parameter] = []
    for parameter in parameters:
        if load and sum(p.nbytes for p in load) + parameter.nbytes > desk_bytes:
            yield load
            load = []
        load.append(parameter)
    yield load


def _shared_tensor(group: Any, elements: int, dtype: torch.dtype) -> Tensor:
    """Opened by the others under the first one's process, where an open file without a name can still be found."""
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
