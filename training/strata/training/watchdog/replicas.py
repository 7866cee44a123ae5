"""Comparison of data-parallel replicas, for silent data corruption.

Replicas have the same parameters, bit by bit, and gradients of about the same norm. Every few steps, and at each step with a
checkpoint, all ranks compare both just before the optimizer uses them. So a checkpoint never follows an update from a replica
that differed, and a restart from the newest one removes the damage. With ZeRO-3 there are no replicas of parameters.
"""

import math
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strata.training.watchdog import ray_node

GRADIENT_RATIO = 10.0  # between a replica's gradient norm and the others': batches differ too, by far less
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaDiffers(Exception):
    """Raised on all ranks. Ray then restarts the workers from the newest checkpoint."""

    def __init__(self, ranks: tuple[int, ...], cause: str, nodes: frozenset[str], parameters: bool) -> None:
        """`nodes` are those against which most replicas agree. `parameters`: these differ, bit by bit; otherwise the norms of
        gradients do, which bad data can cause too."""
        super().__init__(cause)
        self.ranks, self.nodes, self.parameters = ranks, nodes, parameters

    def __reduce__(self) -> tuple[Any, ...]:
        """Ray sends it to the controller. By default an exception is built again from its message alone."""
        return type(self), (self.ranks, str(self), self.nodes, self.parameters)


@dataclass(frozen=True)
class Replica:
    """One rank's part of a comparison. `part` is equal for ranks with the same parameters."""

    rank: int
    part: tuple[int, ...]
    host: str
    checksum: int
    norm: float | None  # of the gradients before their reduction
    node: str = ""  # id of the Ray node


def checksum(parameters: Sequence[Tensor]) -> int:
    """Sum of all bits, as integers: exact in any order, so a single flipped bit changes it."""
    sums = [values.detach().view(-1).view(INTEGERS[values.element_size()]).sum(dtype=torch.int64) for values in parameters]
    return int(torch.stack(sums).sum()) if sums else 0


def different(replicas: Sequence[Replica], before: dict[int, float] | None = None) -> ReplicaDiffers | None:
    """The replicas that differ from most others with the same parameters. `before` has norms of an earlier comparison, by rank:
    of two replicas with different norms, the one that changed more is named."""
    for part in {one.part for one in replicas}:
        peers = [one for one in replicas if one.part == part]
        counts = Counter(one.checksum for one in peers).most_common()
        if len(counts) > 1:
            majority = counts[0][0] if counts[0][1] > counts[1][1] else None
            odd = [one for one in peers if one.checksum != majority]
            blame = "" if majority is not None else " Without a majority it cannot be told which of them is right."
            cause = f"The parameters of {_who(odd)} differ from those of the other replicas: silent data corruption.{blame}"
            return _differs(odd, peers, cause, parameters=True)
        if wrong := _odd_norms(peers, before or {}):
            norms = ", ".join(f"{one.norm:.3g} on rank {one.rank}" for one in peers if one.norm is not None)
            cause = f"The gradients of {_who(wrong)} differ from those of the other replicas (norms: {norms})."
            return _differs(wrong, peers, cause, parameters=False)
    return None


def _differs(odd: Sequence[Replica], peers: Sequence[Replica], cause: str, parameters: bool) -> ReplicaDiffers:
    nodes = frozenset(one.node for one in odd if one.node) if 2 * len(odd) < len(peers) else frozenset[str]()
    return ReplicaDiffers(tuple(one.rank for one in odd), cause, nodes, parameters)


def _odd_norms(peers: Sequence[Replica], before: dict[int, float]) -> list[Replica]:
    norms = {one.rank: one.norm for one in peers if one.norm is not None}
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    if len(norms) < 2 or not finite:  # all are NaN: a step that the loss shows
        return []
    usual = median_low(finite) if len(norms) > 2 else None
    odd = []
    for one in peers:
        others = [norm for rank, norm in norms.items() if rank != one.rank and math.isfinite(norm)]
        if one.norm is not None and others and _far(one.norm, usual or others[0]):
            odd.append(one)
    if len(odd) == 2 == len(peers) and all(before.get(one.rank) and one.norm is not None for one in odd):
        changes = {one.rank: abs(math.log(max(one.norm or 0.0, 1e-30) / before[one.rank])) for one in odd}
        odd = [max(odd, key=lambda one: changes[one.rank])]
    return odd


def _far(norm: float, usual: float) -> bool:
    return not math.isfinite(norm) or norm > GRADIENT_RATIO * usual or norm < usual / GRADIENT_RATIO


def _who(replicas: Sequence[Replica]) -> str:
    return ", ".join(f"rank {one.rank} on {one.host}" for one in replicas)


class Comparison:
    """Hooks of an engine. `part` identifies this rank's parameters."""

    def __init__(self, engine: Any, part: tuple[int, ...], due: Callable[[int], bool], gradients: bool) -> None:
        self._part, self._due, self._gradients = part, due, gradients
        # Experts are distributed over data-parallel ranks.
        self._parameters = [p for p in engine.module.parameters() if not hasattr(p, "group_name")]
        self._trained = [p for p in self._parameters if p.requires_grad]
        self._squares: list[Tensor] = []
        self._handles: list[Any] = []
        self._armed, self._node = False, ray_node.here()
        self._before: dict[int, float] = {}
        engine.basic_optimizer.register_step_pre_hook(lambda *_: self.compare())

    def begin(self, step: int) -> None:
        """Called before the forward pass of a step, by all ranks."""
        self._armed, self._squares = self._due(step), []
        if self._armed and self._gradients:
            self._handles = [p.register_hook(self._add) for p in self._trained]

    def _add(self, gradient: Tensor) -> None:
        self._squares.append(gradient.detach().float().square().sum())

    def compare(self) -> None:
        """Runs before the optimizer's first update of a step: ZeRO updates its groups one by one. The loop calls it after the
        step, as DeepSpeed omits the optimizer if the norm of all gradients is not finite."""
        if not self._armed:
            return
        self._armed = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        norm = float(torch.stack(self._squares).sum().sqrt()) if self._squares else None
        values = [p.data for p in self._parameters]
        mine = Replica(dist.get_rank(), self._part, socket.gethostname(), checksum(values), norm, self._node)
        replicas: list[Any] = [mine] * dist.get_world_size()
        dist.all_gather_object(replicas, mine)
        if found := different(replicas, self._before):
            raise found
        self._before = {one.rank: one.norm for one in replicas if one.norm is not None}
