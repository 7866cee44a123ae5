"""What an engine must remember from one step to the next: fp32 weights and Adam's two moments, wherever DeepSpeed keeps them.

ZeRO keeps them as slices of flat vectors, other optimizers as whole tensors. `slots` names, for each of a rank's parameters,
the elements that this rank is responsible for, as views: to save is to read them, to load is to write them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.layout import place
from strata.training.parallel.shard_map import Piece, pieces

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weight", *MOMENTS)


@dataclass(frozen=True)
class Slot:
    """Elements `start` to `start + count` of a parameter (as this rank has it, flattened)."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    count: int
    owner: Tensor  # the tensor that the optimizer updates, and
    at: int  # where in it, flattened, the elements are

    def view(self, optimizer: torch.optim.Optimizer, kind: str) -> Tensor:
        tensor = self.owner if kind == "weight" else _moments(optimizer, self.owner)[kind]
        return tensor.detach().view(-1).narrow(0, self.at, self.count)


@dataclass(frozen=True)
class Fragment:
    """Elements `start` to `start + values.numel()` of a piece, flattened."""

    piece: Piece
    kind: str
    start: int
    values: Tensor


class Source(Protocol):
    """Where a piece's values come from on loading: a checkpoint in whatever layout."""

    def read_range(self, piece: Piece, kind: str, first: int, last: int) -> Tensor: ...


def owned(engine: Any, parallel: ParallelSection) -> Iterator[Slot]:
    """The slots in which each element of the whole model is found on exactly one rank."""
    tensor = place(engine.global_rank, parallel).tensor
    for slot in slots(engine):
        if getattr(slot.parameter, "ds_pipe_replicated", False):
            continue  # a tied embedding, which is the first stage's
        if tensor > 0 and not getattr(slot.parameter, "tensor_model_parallel", False):
            continue
        yield slot


def fragments(engine: Any, model: ModelSection, parallel: ParallelSection) -> Iterator[Fragment]:
    """All that this rank has to save."""
    here = place(engine.global_rank, parallel)
    optimizer = _torch_optimizer(engine)
    for slot in owned(engine, parallel):
        for piece in pieces(slot.name, slot.shape, model, parallel, here):
            first = max(slot.start, piece.offset)
            last = min(slot.start + slot.count, piece.offset + piece.numel)
            if first >= last:
                continue
            for kind in KINDS:
                values = slot.view(optimizer, kind).narrow(0, first - slot.start, last - first)
                yield Fragment(piece, kind, first - piece.offset, values)


@torch.no_grad()
def load(engine: Any, model: ModelSection, parallel: ParallelSection, source: Source, step: int) -> None:
    """Reads the moments that this rank's optimizer has, and the weights that its parameters hold, and no others."""
    here = place(engine.global_rank, parallel)
    optimizer = _torch_optimizer(engine)
    by_name = {slot.name: slot for slot in slots(engine, share=False)}
    for name, parameter in engine.module.named_parameters():
        slot = by_name.get(name)
        local = pieces(name, _shape(parameter), model, parallel, here)
        if slot is None or _is_whole(parameter):
            weights = _values(source, local, "weight", 0, sum(piece.numel for piece in local))
            parameter.data.copy_(weights.view_as(parameter))  # perhaps of lower precision than the optimizer's
            own = weights.narrow(0, slot.start, slot.count) if slot else None
        else:
            own = _values(source, local, "weight", slot.start, slot.start + slot.count)
        if slot is None:
            continue
        assert own is not None
        if hasattr(parameter, "ds_id"):
            parameter.ds_tensor.data.view(-1).narrow(0, 0, slot.count).copy_(own)
        slot.view(optimizer, "weight").copy_(own)
        for kind in MOMENTS:
            slot.view(optimizer, kind).copy_(_values(source, local, kind, slot.start, slot.start + slot.count))
    for state in optimizer.state.values():
        state["step"].fill_(float(step))


def _values(source: Source, local: list[Piece], kind: str, first: int, last: int) -> Tensor:
    """Elements `first` to `last` of a local parameter, flattened, which is `local` one after another."""
    parts = []
    for piece in local:
        low, high = max(first - piece.offset, 0), min(last - piece.offset, piece.numel)
        if low < high:
            parts.append(source.read_range(piece, kind, low, high))
    return torch.cat(parts) if parts else torch.empty(0)


def slots(engine: Any, share: bool = True) -> Iterator[Slot]:
    """With `share`, what data-parallel workers all have is divided among them; without, each has all of it."""
    optimizer = engine.optimizer
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            yield _zero3_slot(name, optimizer, parameter)
        elif hasattr(parameter, "_hp_mapping"):
            if parameter._hp_mapping is not None:  # else all of it is another rank's
                yield _partition_slot(name, optimizer, parameter)
        else:
            yield _whole_slot(name, engine, parameter, share)


def _zero3_slot(name: str, optimizer: Any, parameter: Any) -> Slot:
    group, at, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    size = parameter.ds_tensor.ds_numel
    start = size * optimizer._get_param_partition_rank(parameter)
    count = max(0, min(size, parameter.ds_numel - start))  # the last partitions are padded
    return Slot(name, parameter, _shape(parameter), start, count, optimizer.fp32_partitioned_groups_flat[group], at)


def _partition_slot(name: str, optimizer: Any, parameter: Any) -> Slot:
    mapping = parameter._hp_mapping
    owner = optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
    lies = mapping.lp_fragment_address
    return Slot(name, parameter, tuple(parameter.shape), lies.start, lies.numel, owner, mapping.hp_fragment_address.start)


def _whole_slot(name: str, engine: Any, parameter: nn.Parameter, share: bool) -> Slot:
    owner = _masters(engine.optimizer).get(parameter, parameter)
    group = engine.seq_data_parallel_group
    if hasattr(parameter, "group_name"):
        group = engine.expert_data_parallel_group[parameter.group_name]
    size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    if not share:
        size, rank = 1, 0
    start, stop = (parameter.numel() * r // size for r in (rank, rank + 1))
    return Slot(name, parameter, tuple(parameter.shape), start, stop - start, owner, start)


def _masters(optimizer: Any) -> dict[nn.Parameter, Tensor]:
    """bf16 without ZeRO: DeepSpeed keeps an fp32 copy beside each parameter."""
    if not hasattr(optimizer, "fp16_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {low: master for lows, masters in pairs for low, master in zip(lows, masters, strict=True)}


def _torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    optimizer = engine.optimizer
    inner: torch.optim.Optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
    return inner


def _moments(optimizer: torch.optim.Optimizer, owner: Tensor) -> dict[str, Tensor]:
    """Adam makes them at its first step; a run that resumes needs them before."""
    state: dict[str, Tensor] = optimizer.state[owner]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=owner.device)
        for key in MOMENTS:
            state[key] = torch.zeros_like(owner)
    return state


def _is_whole(parameter: Any) -> bool:
    """Whether this rank computes with all of it: under ZeRO-3 only small ones stay gathered."""
    return not hasattr(parameter, "ds_id") or parameter.numel() == parameter.ds_numel


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
