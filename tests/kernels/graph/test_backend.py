"""Backend strata on transformers' Llama, Qwen3 and Mixtral: exact counts of fusions, equal losses, logits and gradients."""

import math
import shutil
from typing import Any

import pytest
import torch
from kernels.graph.tiny_models import FAMILIES, batch, tiny
from torch import Tensor

from strata.kernels.graph.record import Record

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for CPUs with g++")
NORMS = {"llama": 1, "qwen3": 5, "mixtral": 1}  # without a residual before them; Qwen3 has one for queries and keys of each layer


def expected(family: str, trains: bool) -> dict[str, int]:
    counts = {"rms_norm": NORMS[family], "add_rms_norm": 4, "rope": 2, "swiglu": 2, "flash_attention": 2}
    return counts | ({"linear_cross_entropy": 1} if trains else {})


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_equal_training(model: Any, step: Any, compiled: Any, ids: Tensor, labels: Tensor) -> None:
    theirs, ours = step(ids, labels), compiled(ids, labels)
    assert math.isclose(ours.item(), theirs.item(), rel_tol=1e-6)
    for one, other in zip(gradients(model, ours), gradients(model, theirs), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_step_is_fused_and_equal_for_every_shape(family: str) -> None:
    model, record = tiny(family).train(), Record()

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, labels=labels, use_cache=False).loss  # type: ignore[no-any-return]

    compiled = torch.compile(step, backend="strata", fullgraph=True, options={"tail": "eager", "record": record})
    ids, labels = batch(2, 12)
    for tensor in (ids, labels):
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(tensor, dim)
    assert_equal_training(model, step, compiled, ids, labels)
    assert record.counts() == expected(family, trains=True)
    assert not record.refused
    assert_equal_training(model, step, compiled, *batch(3, 7, seed=1))
    assert record.graphs == 1


def test_inference_in_bf16_is_fused_and_close() -> None:
    model, record = tiny("qwen3").to(torch.bfloat16).eval(), Record()

    def logits(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    ids, _ = batch(2, 16)
    compiled = torch.compile(logits, backend="strata", fullgraph=True, options={"tail": "eager", "record": record})
    with torch.no_grad():
        ours, theirs = compiled(ids), logits(ids)
    assert record.counts() == expected("qwen3", trains=False)
    assert not record.refused
    assert (ours - theirs).float().norm() < 2e-2 * theirs.float().norm()


def test_an_altered_norm_is_left_and_reported() -> None:
    model, record = tiny("llama").eval(), Record()
    norm = model.model.layers[1].input_layernorm

    def altered(x: Tensor) -> Tensor:
        return norm.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6))  # type: ignore[no-any-return]

    norm.forward = altered

    def logits(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    ids, _ = batch(2, 9)
    with torch.no_grad():
        compiled = torch.compile(logits, backend="strata", fullgraph=True, options={"tail": "eager", "record": record})
        torch.testing.assert_close(compiled(ids), logits(ids))
    assert record.counts()["add_rms_norm"] == 3
    (refusal,) = record.refused
    assert refusal.pattern == "rms_norm" and refusal.where.startswith("model.layers.1")
    assert "sqrt" in refusal.reason


def test_unknown_tails_are_refused() -> None:
    with pytest.raises(Exception, match="has the tails inductor, aot_eager, eager, got 'jit'"):
        torch.compile(torch.sin, backend="strata", options={"tail": "jit"})(torch.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["aot_eager", pytest.param("inductor", marks=[NEEDS_COMPILER, pytest.mark.rotation])])
def test_gradients_through_autograd_and_inductor(tail: str) -> None:
    model, record = tiny("qwen3").train(), Record()

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=11).loss  # type: ignore[no-any-return]

    compiled = torch.compile(step, backend="strata", fullgraph=True, options={"tail": tail, "record": record})
    assert_equal_training(model, step, compiled, *batch(2, 12))
    assert record.counts() == expected("qwen3", trains=True)
