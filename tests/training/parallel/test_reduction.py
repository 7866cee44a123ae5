"""Scales, buckets and partitions of data parallelism, with stand-ins for engines and process groups."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.platform.recipe import ParallelSection
from strata.training.parallel import data, optimizer_state
from strata.training.parallel.optimizer_state import Slot
from strata.training.parallel.shard_map import Cut, Shard


@pytest.mark.parametrize(
    ("layout", "scale", "replaced"),
    [
        ({"zero": 0}, 1 / 12, True),
        ({"zero": 0, "sequence": 2}, 1 / 12, True),  # 6 data-parallel ranks x 2
        ({"zero": 0, "tensor": 4}, 1 / 3, True),
        ({"zero": 0, "pipeline": 2}, 1.0, False),
        ({"zero": 1}, 1.0, False),
        ({"zero": 1, "sequence": 2}, 1 / 2, False),
        ({"zero": 2, "sequence": 3}, 1 / 3, False),
        ({"zero": 3, "sequence": 3}, 1.0, False),
    ],
)
def test_scale_of_a_workers_loss(layout: dict[str, int], scale: float, replaced: bool) -> None:
    """A sum over ranks needs the mean over all of them; DeepSpeed averages over data-parallel ranks itself."""
    parallel = ParallelSection.model_validate({"workers": 12} | layout)
    assert data.gradient_scale(parallel) == pytest.approx(scale)
    assert data.replaces_deepspeed(parallel) == replaced


class Engine:
    """Engine with four parameters of 3, 2, 4 and 1 elements; the last belongs to an expert, whose group has one rank."""

    def __init__(self) -> None:
        sizes = (3, 2, 4, 1)
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        self.parameters[3].group_name = "experts"  # type: ignore[attr-defined]
        self.module = SimpleNamespace(parameters=lambda: iter(self.parameters))
        self.seq_data_parallel_group, self.expert_data_parallel_group = "all", {"experts": "alone"}
        self.boundary = True

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.boundary


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Buckets in the order of their reduction, which multiplies each value by 10 when it is waited for."""
    buckets: list[list[float]] = []

    def all_reduce(buffer: Tensor, group: str, async_op: bool) -> Any:
        assert group == "all" and async_op
        buckets.append(buffer.tolist())
        return SimpleNamespace(wait=lambda: buffer.mul_(10))

    monkeypatch.setattr(data.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(data.dist, "get_world_size", {"all": 2, "alone": 1}.__getitem__)
    monkeypatch.setattr(data, "BUCKET_BYTES", 20)
    return buckets


def test_full_buckets_are_reduced_during_the_backward_pass(reduced: list[list[float]]) -> None:
    """A bucket has 20 bytes or more: 3 + 2 elements fill the first. The rest follows after the last gradient."""
    engine = Engine()
    reduction = data.Reduction(engine)
    for repeat in (1.0, 2.0):
        reduced.clear()
        sent = []
        for number, parameter in enumerate(engine.parameters):
            parameter.grad = torch.full_like(parameter, repeat + number)
            reduction.add(parameter)
            sent.append(len(reduced))
        assert sent == [0, 1, 1, 2]
        assert reduced == [[repeat] * 3 + [repeat + 1] * 2, [repeat + 2] * 4]
        reduction.finish()
        found = [parameter.grad.tolist() for parameter in engine.parameters if parameter.grad is not None]
        assert found == [[10 * repeat] * 3, [10 * (repeat + 1)] * 2, [10 * (repeat + 2)] * 4, [repeat + 3]]


def test_accumulated_gradients_are_not_reduced(reduced: list[list[float]]) -> None:
    engine = Engine()
    engine.boundary = False
    reduction = data.Reduction(engine)
    for parameter in engine.parameters:
        parameter.grad = torch.ones_like(parameter)
        reduction.add(parameter)
    reduction.finish()
    assert reduced == [] and all(parameter.grad is not None and parameter.grad.eq(1).all() for parameter in engine.parameters)


def test_buckets_have_25_mib() -> None:
    assert data.BUCKET_BYTES == 25 * 1024 * 1024


class Source:
    """Whole parameters with known values, each shard numbered from its own base."""

    def read_range(self, shard: Shard, kind: str, first: int, last: int) -> Tensor:
        assert 0 <= first < last <= shard.numel
        base = {"a": 100.0, "b": 200.0, "c": 300.0}[shard.name]
        return torch.arange(base + first, base + last) * (1 if kind == "weight" else -1)


SHARDS = [Shard("a", (2, 2), None, 0), Shard("b", (6,), Cut(0, 0, 3), 4), Shard("c", (5,), None, 7)]
ALL = [100.0, 101, 102, 103, 200, 201, 202, 300, 301, 302, 303, 304]


@pytest.mark.parametrize(("first", "last"), [(0, 12), (0, 4), (4, 7), (3, 8), (2, 3), (11, 12), (5, 5), (7, 12)])
def test_elements_of_a_local_parameter_are_read_across_shards(first: int, last: int) -> None:
    found = optimizer_state._values(Source(), SHARDS, "weight", first, last)
    assert found.tolist() == ALL[first:last]


@pytest.mark.parametrize(("size", "numel"), [(1, 5), (2, 5), (3, 10), (4, 3)])
def test_replicated_state_is_divided_among_ranks(monkeypatch: pytest.MonkeyPatch, size: int, numel: int) -> None:
    """Every element has one owner, in order, and parts differ by one element at most."""
    engine = Engine()
    engine.optimizer = SimpleNamespace()  # type: ignore[attr-defined]
    parameter = nn.Parameter(torch.zeros(numel))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: size)
    parts = []
    for rank in range(size):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        slot = optimizer_state._whole_slot("w", engine, parameter, partition=True)
        assert slot.at == slot.start and slot.owner is parameter and slot.shape == (numel,)
        parts.append(list(range(slot.start, slot.start + slot.count)))
        whole = optimizer_state._whole_slot("w", engine, parameter, partition=False)
        assert (whole.start, whole.count) == (0, numel)
    assert [element for part in parts for element in part] == list(range(numel))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("rank", "start", "count"), [(0, 0, 4), (1, 4, 4), (2, 8, 2), (3, 12, 0)])
def test_last_partitions_of_zero_3_are_padded(rank: int, start: int, count: int) -> None:
    """Ten elements in partitions of four."""
    parameter = SimpleNamespace(ds_tensor=SimpleNamespace(ds_numel=4), ds_numel=10, ds_shape=(2, 5), shape=(0,))
    optimizer = SimpleNamespace(
        grad_position={7: (1, 30, None)},
        get_param_id=lambda _: 7,
        _get_param_partition_rank=lambda _: rank,
        fp32_partitioned_groups_flat=["first", "second"],
    )
    slot = optimizer_state._zero3_slot("w", optimizer, parameter)
    assert (slot.start, slot.count, slot.owner, slot.at, slot.shape) == (start, count, "second", 30, (2, 5))


def test_view_of_a_slot() -> None:
    """Elements 2 to 4 of a parameter, which are elements 5 to 7 of the tensor that the optimizer updates."""
    owner = nn.Parameter(torch.arange(12.0).view(3, 4))
    optimizer = torch.optim.Adam([owner])
    slot = Slot("w", owner, (6,), 2, 3, owner, 5)
    assert slot.view(optimizer, "weight").tolist() == [5.0, 6.0, 7.0]
    slot.view(optimizer, "exp_avg").fill_(9)
    state = optimizer.state[owner]
    assert state["exp_avg"].flatten().tolist() == [0.0] * 5 + [9.0] * 3 + [0.0] * 4
    assert state["step"].item() == 0 and not state["exp_avg_sq"].any()


@pytest.mark.parametrize(
    ("rank", "flags", "saved"),
    [
        (0, {}, True),
        (1, {}, False),  # a replica of tensor-parallel rank 0
        (1, {"tensor_model_parallel": True}, True),
        (0, {"tensor_model_parallel": True}, True),
        (0, {"ds_pipe_replicated": True}, False),
        (2, {}, True),  # rank 0 of the next tensor-parallel group
    ],
)
def test_each_element_is_saved_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, flags: dict[str, bool], saved: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    for name, value in flags.items():
        setattr(parameter, name, value)
    slot = Slot("w", parameter, (2,), 0, 2, parameter, 0)
    monkeypatch.setattr(optimizer_state, "slots", lambda _: iter([slot]))
    found = list(optimizer_state.owned(SimpleNamespace(global_rank=rank), ParallelSection(workers=4, tensor=2)))
    assert found == ([slot] if saved else [])


def test_fragments_of_a_slot_are_divided_at_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements 3 to 8 of a parameter of three shards: the last of the first, all of the second, the first of the third."""
    owner = nn.Parameter(torch.arange(12.0))
    optimizer = torch.optim.Adam([owner])
    slot = Slot("w", owner, (12,), 3, 5, owner, 3)
    monkeypatch.setattr(optimizer_state, "owned", lambda *_: iter([slot]))
    monkeypatch.setattr(optimizer_state, "local_shards", lambda *_: [*SHARDS, Shard("d", (2,), None, 12)])
    engine: Any = SimpleNamespace(global_rank=0, optimizer=optimizer)
    model: Any = None
    found = list(optimizer_state.fragments(engine, model, ParallelSection()))
    assert [(f.shard.name, f.kind, f.start) for f in found if f.kind != "exp_avg_sq"] == [
        ("a", "weight", 3),
        ("a", "exp_avg", 3),
        ("b", "weight", 0),
        ("b", "exp_avg", 0),
        ("c", "weight", 0),
        ("c", "exp_avg", 0),
    ]
    assert [f.values.tolist() for f in found if f.kind == "weight"] == [[3.0], [4.0, 5.0, 6.0], [7.0]]


@pytest.mark.parametrize(("device", "reachable", "shared"), [("cpu", True, True), ("cpu", False, False), ("meta", True, False)])
def test_gradients_are_summed_in_shared_memory_only_on_cpus_of_one_machine(
    monkeypatch: pytest.MonkeyPatch, device: str, reachable: bool, shared: bool
) -> None:
    """Only the parameters of a group with several ranks are summed at all."""
    engine: Any = Engine()
    if device != "cpu":
        engine.parameters[0] = nn.Parameter(torch.zeros(3, device=device))
    sums: list[tuple[str, list[int], int]] = []

    def shared_sum(group: str, parameters: list[nn.Parameter], bucket: int) -> int:
        sums.append((group, [parameter.numel() for parameter in parameters], bucket))
        return len(sums)

    added: list[int] = []
    monkeypatch.setattr(data.Reduction, "add", lambda self, parameter: added.append(parameter.numel()))
    monkeypatch.setattr(data.Reduction, "finish", lambda self: "finished")
    monkeypatch.setattr(data.dist, "get_world_size", {"all": 2, "alone": 1}.__getitem__)
    monkeypatch.setattr(data.shared_memory, "reachable", lambda _: reachable)
    monkeypatch.setattr(data.shared_memory, "SharedSum", shared_sum)
    monkeypatch.setattr(data.shared_memory, "all_reduce", lambda sums: f"summed {sums}")
    data.attach(engine)
    assert sums == ([("all", [3, 2, 4], data.BUCKET_BYTES)] if shared else [])
    assert engine.buffered_allreduce_fallback([], elements_per_buffer=1) == ("summed [1]" if shared else "finished")
    engine.parameters[1].sum().backward()
    assert added == ([] if shared else [2])


def test_weights_moments_and_step_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 2)), "c": nn.Parameter(torch.zeros(5))})
    optimizer = torch.optim.Adam(module.parameters())
    engine: Any = SimpleNamespace(global_rank=0, module=module, optimizer=optimizer, seq_data_parallel_group=None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 3)
    model: Any = None
    optimizer_state.load(engine, model, ParallelSection(), Source(), step=7)
    assert module["a"].tolist() == [[100, 101], [102, 103]] and module["c"].tolist() == [300, 301, 302, 303, 304]
    for parameter in module.values():
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"], -parameter) and torch.equal(state["exp_avg_sq"], -parameter)
        assert state["step"].item() == 7


def test_masters_of_bf16_without_zero() -> None:
    low, master = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), torch.zeros(2)
    assert optimizer_state._masters(SimpleNamespace(fp16_groups=[[low]], fp32_groups=[[master]])) == {low: master}
    assert optimizer_state._masters(SimpleNamespace()) == {}


@pytest.mark.parametrize(("numel", "whole"), [(10, True), (0, False)])
def test_small_parameters_stay_gathered_with_zero_3(numel: int, whole: bool) -> None:
    partitioned: Any = SimpleNamespace(ds_id=1, ds_numel=10, numel=lambda: numel)
    assert optimizer_state._is_whole(partitioned) == whole
    assert optimizer_state._is_whole(nn.Parameter(torch.zeros(2)))
