"""Norms and scales of gradients with stand-ins for engines and for the reduction over ranks."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.platform.recipe import ParallelSection
from strata.training.parallel import clipping, optimizer_state

SPLIT = ParallelSection(workers=2, tensor=2)


def parameter(*gradient: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient)
    return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank with the elements 4 and 12 of one gradient, 2 of another; the squares of other ranks add up to 36."""
    slots = [
        SimpleNamespace(parameter=parameter(3.0, 4.0, 12.0, 100.0), start=1, count=2),
        SimpleNamespace(parameter=parameter(2.0), start=0, count=1),
    ]

    def owned(_: Any, parallel: ParallelSection) -> Iterator[Any]:
        assert parallel is SPLIT
        return iter(slots)

    def all_reduce(squares: Tensor) -> None:
        squares += 36

    monkeypatch.setattr(optimizer_state, "owned", owned)
    monkeypatch.setattr(clipping.dist, "all_reduce", all_reduce)
    optimizer = torch.optim.SGD([slot.parameter for slot in slots], lr=0.1)
    return SimpleNamespace(device="cpu", optimizer=optimizer, limit=1.0)


NORM = (4**2 + 12**2 + 2**2 + 36) ** 0.5


@pytest.mark.parametrize(("limit", "scale"), [(2.0, NORM / 2), (NORM / 1.001, 1.001), (NORM * 1.001, 1.0), (1000.0, 1.0)])
def test_gradients_are_scaled_down_to_the_limit(engine: Any, limit: float, scale: float) -> None:
    engine.gradient_clipping = lambda: limit
    assert clipping.clip_gradients(engine, SPLIT) == pytest.approx(NORM)
    assert engine.optimizer.grad_scale.item() == pytest.approx(scale, rel=1e-5)


def test_tiny_norm_is_not_divided_by_zero(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "owned", lambda *_: iter(()))
    monkeypatch.setattr(clipping.dist, "all_reduce", lambda _: None)
    engine.gradient_clipping = lambda: 1e-7
    assert clipping.clip_gradients(engine, SPLIT) == 0.0
    assert engine.optimizer.grad_scale.item() == pytest.approx(10)  # (0 + 1e-6) / 1e-7


def test_engine_with_a_torch_optimizer_clips_by_the_whole_norm(engine: Any) -> None:
    engine.gradient_clipping = lambda: 1.0
    clipping.correct(engine, SPLIT)
    engine.clip_fp32_gradients()
    assert engine._global_grad_norm == pytest.approx(NORM)


def test_data_parallel_ranks_have_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no reduction, which would also count every gradient once a rank. Frozen parameters have no gradient."""
    monkeypatch.setattr(clipping.dist, "all_reduce", None)
    module = nn.ParameterList([parameter(3.0, 4.0), parameter(12.0), nn.Parameter(torch.zeros(2), requires_grad=False)])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = SimpleNamespace(module=module, optimizer=optimizer, gradient_clipping=lambda: 2.0)
    assert clipping.clip_gradients(engine, ParallelSection(workers=2)) == pytest.approx(13.0)
    assert optimizer.grad_scale.item() == pytest.approx(6.5, rel=1e-5)  # type: ignore[attr-defined]


class Zero:
    """Stand-in for ZeRO-1's optimizer with two parameter groups, of which the first is padded."""

    def __init__(self) -> None:
        padding = torch.tensor([9.0])
        padding._zero_padding = True  # type: ignore[attr-defined]
        self.params_in_partition = [["a", "b"], ["c"]]
        self.averaged_gradients = {0: ["grad a", "grad b", padding], 1: ["grad c"]}

    def scaled_global_norm(self) -> str:
        return "DeepSpeed's"

    def get_grad_norm_direct(self, gradients: list[Any], parameters: list[Any]) -> tuple[list[Any], list[Any]]:
        return gradients, parameters


@pytest.mark.parametrize("stages", [1, 2])
def test_pipeline_with_zero_reduces_all_groups_in_one(stages: int) -> None:
    engine = SimpleNamespace(optimizer=Zero())
    clipping.correct(engine, ParallelSection(workers=2, pipeline=stages))
    found: Any = engine.optimizer.scaled_global_norm()
    expected = (["grad a", "grad b", "grad c"], ["a", "b", "c"])
    assert found == (expected if stages > 1 else "DeepSpeed's")
    assert not hasattr(engine, "clip_fp32_gradients")


def test_pipeline_without_such_a_method_is_left_alone() -> None:
    engine = SimpleNamespace(optimizer=SimpleNamespace())
    clipping.correct(engine, ParallelSection(workers=2, pipeline=2))
    assert not hasattr(engine.optimizer, "scaled_global_norm")
