"""Optimizer state of an engine: fp32 weights and Adam's two moments, in whatever form DeepSpeed stores them. An engine that
averages its weights (`weight_average.py`) has the average too.

ZeRO stores them as slices of flat vectors, other optimizers as whole tensors. `slots` yields views of the elements that this
rank is responsible for, per parameter: a save reads the views, a load writes them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata.platform.recipe import ModelSection, ParallelSection
from strata.training.layout import place
from strata.training.parallel.shard_map import Shard, local_shards, whole_name

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weight", *MOMENTS)
AVERAGE = "average"


@dataclass(frozen=True)
class Slot:
    """Elements `start` to `start + count` of this rank's parameter, flattened."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    count: int
    owner: Tensor  # the tensor that the optimizer updates
    at: int  # offset of the elements in `owner`, flattened

    def view(self, optimizer: torch.optim.Optimizer, kind: str) -> Tensor:
        tensor = self.owner if kind == "weight" else _moments(optimizer, self.owner)[kind]
        return tensor.detach().view(-1).narrow(0, self.at, self.count)


@dataclass(frozen=True)
class Fragment:
    """Elements `start` to `start + values.numel()` of a shard, flattened."""

    shard: Shard
    kind: str
    start: int
    values: Tensor


class Source(Protocol):
    """Source of values for a load, such as a checkpoint in any layout."""

    def read_range(self, shard: Shard, kind: str, first: int, last: int) -> Tensor: ...


def owned(engine: Any, parallel: ParallelSection) -> Iterator[Slot]:
    """Slots in which each trained element of the whole model occurs on exactly one rank."""
    tensor = place(engine.global_rank, parallel).tensor
    for slot in slots(engine):
        if getattr(slot.parameter, "ds_pipe_replicated", False):
            continue  # a tied embedding belongs to the first stage
        if tensor > 0 and not getattr(slot.parameter, "tensor_model_parallel", False):
            continue
        yield slot


def fragments(engine: Any, model: ModelSection, parallel: ParallelSection) -> Iterator[Fragment]:
    """Fragments that this rank saves."""
    here = place(engine.global_rank, parallel)
    optimizer = _torch_optimizer(engine)
    for slot in owned(engine, parallel):
        for shard in local_shards(slot.name, slot.shape, model, parallel, here):
            first = max(slot.start, shard.offset)
            last = min(slot.start + slot.count, shard.offset + shard.numel)
            if first >= last:
                continue
            views = {kind: slot.view(optimizer, kind) for kind in KINDS}
            if average := _average(engine):
                views[AVERAGE] = average.values[slot.name]
            for kind, view in views.items():
                yield Fragment(shard, kind, first - shard.offset, view.narrow(0, first - slot.start, last - first))


@torch.no_grad()
def load(
    engine: Any,
    model: ModelSection,
    parallel: ParallelSection,
    source: Source,
    step: int,
    include: Callable[[str, nn.Parameter], bool] = lambda name, parameter: parameter.requires_grad,
) -> None:
    """Loads this rank's weights and moments, and reads nothing else. `include` selects the parameters, by default the trained
    ones: a checkpoint has no others."""
    here = place(engine.global_rank, parallel)
    optimizer = _torch_optimizer(engine)
    by_name = {slot.name: slot for slot in slots(engine, partition=False)}
    for name, parameter in engine.module.named_parameters():
        if not include(whole_name(name, model, parallel), parameter):
            continue
        if not parameter.requires_grad:
            _load_frozen(parameter, source, local_shards(name, _shape(parameter), model, parallel, here))
            continue
        slot = by_name.get(name)
        local = local_shards(name, _shape(parameter), model, parallel, here)
        if slot is None or _is_whole(parameter):
            weights = _values(source, local, "weight", 0, sum(shard.numel for shard in local))
            parameter.data.copy_(weights.view_as(parameter))  # may have lower precision than the optimizer's
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
    if average := _average(engine):
        for slot in slots(engine):
            local = local_shards(slot.name, slot.shape, model, parallel, here)
            average.values[slot.name].copy_(_values(source, local, AVERAGE, slot.start, slot.start + slot.count))


@torch.no_grad()
def undo_first_step(engine: Any) -> None:
    """Undoes the step by which DeepSpeed creates the state of bf16 training without ZeRO. It decays the weights, and Adam counts
    it, so a run would not be the same after a load, which sets the number of real steps."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return
    for parameter, master in _masters(engine.optimizer).items():
        master.copy_(parameter)
        _moments(_torch_optimizer(engine), master)["step"].zero_()


def before_update(engine: Any, call: Callable[..., None]) -> None:
    """Calls a function before each change of the state by the optimizer, which may be several in a step."""
    _torch_optimizer(engine).register_step_pre_hook(call)


def weights(engine: Any) -> dict[str, Tensor]:
    """Views of the weights in this rank's slots, by the names of their parameters."""
    optimizer = _torch_optimizer(engine)
    return {slot.name: slot.view(optimizer, "weight") for slot in slots(engine)}


def _average(engine: Any) -> Any:
    return getattr(engine, "average", None)


def _load_frozen(parameter: Any, source: Source, local: list[Shard]) -> None:
    if _is_whole(parameter):
        values = _values(source, local, "weight", 0, sum(shard.numel for shard in local))
        parameter.data.copy_(values.view_as(parameter))
    if hasattr(parameter, "ds_id"):
        size = parameter.ds_tensor.ds_numel
        start = size * dist.get_rank(parameter.ds_process_group)
        count = max(0, min(size, parameter.ds_numel - start))
        parameter.ds_tensor.data.view(-1).narrow(0, 0, count).copy_(_values(source, local, "weight", start, start + count))


def _values(source: Source, local: list[Shard], kind: str, first: int, last: int) -> Tensor:
    """Elements `first` to `last` of a local parameter, flattened: the concatenation of the shards `local`."""
    parts = []
    for shard in local:
        low, high = max(first - shard.offset, 0), min(last - shard.offset, shard.numel)
        if low < high:
            parts.append(source.read_range(shard, kind, low, high))
    return torch.cat(parts) if parts else torch.empty(0)


def slots(engine: Any, partition: bool = True) -> Iterator[Slot]:
    """Slots of this rank. `partition` divides state that data-parallel ranks replicate among them; otherwise each rank has all
    of it."""
    optimizer = engine.optimizer
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):
            yield _zero3_slot(name, optimizer, parameter)
        elif hasattr(parameter, "_hp_mapping"):
            if parameter._hp_mapping is not None:  # otherwise other ranks have all of it
                yield _partition_slot(name, optimizer, parameter)
        else:
            yield _whole_slot(name, engine, parameter, partition)


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


def _whole_slot(name: str, engine: Any, parameter: nn.Parameter, partition: bool) -> Slot:
    owner = _masters(engine.optimizer).get(parameter, parameter)
    group = engine.seq_data_parallel_group
    if hasattr(parameter, "group_name"):
        group = engine.expert_data_parallel_group[parameter.group_name]
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if not partition:
        size, rank = 1, 0
    start, stop = (parameter.numel() * r // size for r in (rank, rank + 1))
    return Slot(name, parameter, tuple(parameter.shape), start, stop - start, owner, start)


def _masters(optimizer: Any) -> dict[nn.Parameter, Tensor]:
    """fp32 master weights by parameter, which DeepSpeed has for bf16 without ZeRO."""
    if not hasattr(optimizer, "fp16_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {low: master for lows, masters in pairs for low, master in zip(lows, masters, strict=True)}


def _torch_optimizer(engine: Any) -> torch.optim.Optimizer:
    optimizer = engine.optimizer
    inner: torch.optim.Optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
    return inner


def _moments(optimizer: torch.optim.Optimizer, owner: Tensor) -> dict[str, Tensor]:
    """Adam's moments. Creates them if they do not exist: Adam does so only at its first step, which is too late for a load."""
    state: dict[str, Tensor] = optimizer.state[owner]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=owner.device)
        for key in MOMENTS:
            state[key] = torch.zeros_like(owner)
    return state


def _is_whole(parameter: Any) -> bool:
    """True if this rank has the whole parameter: with ZeRO-3, only small parameters stay gathered."""
    return not hasattr(parameter, "ds_id") or parameter.numel() == parameter.ds_numel


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
