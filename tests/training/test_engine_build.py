"""Assembly of an engine without its start: DeepSpeed's `initialize` is a stand-in that records its arguments."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strata.platform import recipe_file
from strata.training import engine
from strata.training.model.llama import Head, Layer

SHAPE = ("model.layers=1", "model.hidden=16", "model.heads=4", "model.kv_heads=4", "model.ffn=24", "train.micro_batch=1")


class Built:
    """Calls that `engine.build` made, by name."""

    def __init__(self, patch: pytest.MonkeyPatch, *overrides: str) -> None:
        import deepspeed

        self.calls: dict[str, Any] = {}
        self.recipe = recipe_file.load("laptop", [*SHAPE, "model.vocab=512", "train.batch=24", *overrides])

        def record(name: str, result: object = None) -> Any:
            return lambda *arguments, **named: self.calls.__setitem__(name, (arguments, named)) or result

        patch.setenv("DS_ACCELERATOR", "cuda")
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
        patch.setattr(deepspeed, "init_distributed", record("init"))
        patch.setattr(deepspeed, "initialize", record("initialize", ("the engine", None)))
        patch.setattr(torch, "set_num_threads", record("threads"))
        patch.setattr(torch, "set_float32_matmul_precision", record("matmul"))
        patch.setattr(engine.optimizer_state, "undo_first_step", record("first step"))
        patch.setattr(engine.clipping, "correct", record("clipping"))
        patch.setattr(engine.gradient_accumulation, "attach", record("accumulation"))
        patch.setattr(engine.data, "attach", record("reduction"))
        patch.setattr(engine.balance, "attach", record("balance"))
        patch.setattr(engine.sequence, "initialize", record("groups", "the groups"))
        patch.setattr(engine.sequence, "apply", record("sequence"))
        selection = SimpleNamespace(recompute_reduced=record("reduced"))
        patch.setattr(
            engine.recompute, "apply", record("recompute", selection if "train.recompute=selective" in overrides else None)
        )
        for kind in (Layer, Head):
            patch.setattr(kind, "compile", record(f"compiled {kind.__name__}"))
        self.engine = engine.build(self.recipe.model, self.recipe.train, self.recipe.parallel)
        self.named = self.calls["initialize"][1]
        self.compatible = deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]


def test_plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(monkeypatch, "parallel.workers=2", "parallel.zero=1", "parallel.cpus_per_worker=3", "train.matmul=high")
    assert built.engine == "the engine" and built.named["mpu"] is None and built.compatible is False
    assert engine.os.environ["DS_ACCELERATOR"] == "cpu"
    assert built.calls["threads"][0] == (3,) and built.calls["matmul"][0] == ("high",)
    assert built.calls["clipping"][0] == ("the engine", built.recipe.parallel)
    assert built.calls["first step"][0] == ("the engine",)
    assert built.named["config"]["gradient_accumulation_steps"] == 12
    extras = {"reduction", "balance", "groups", "sequence", "reduced", "compiled Layer", "compiled Head"}
    assert not extras & built.calls.keys()


def test_optimizer_is_adamw_on_the_final_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(monkeypatch, "train.lr=0.02")
    optimizer = built.named["optimizer"](None)
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["lr"] == 0.02 and optimizer.defaults["fused"] is True
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(built.named["model"].parameters()))


@pytest.mark.parametrize(("zero", "replaced"), [(0, True), (1, False)])
def test_reduction_replaces_deepspeeds_without_zero(monkeypatch: pytest.MonkeyPatch, zero: int, replaced: bool) -> None:
    assert ("reduction" in Built(monkeypatch, "parallel.workers=2", f"parallel.zero={zero}").calls) == replaced


@pytest.mark.parametrize(("zero", "scale"), [(0, 1 / 24), (1, 1 / 12)])
def test_balance_is_scaled_like_the_loss(monkeypatch: pytest.MonkeyPatch, zero: int, scale: float) -> None:
    """12 micro-batches on each of 2 workers. Without ZeRO the reduction sums over both of them."""
    built = Built(monkeypatch, "model.moe.experts=2", "parallel.workers=2", f"parallel.zero={zero}")
    assert built.calls["balance"][1]["scale"] == pytest.approx(scale)


def test_sequence_parallel_engine_has_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(monkeypatch, "parallel.workers=2", "parallel.sequence=2")
    assert built.calls["groups"][0] == (2,) and built.named["mpu"] == "the groups"
    assert built.calls["sequence"][0][1] == "the groups"


@pytest.mark.parametrize(
    ("tensor", "recompute", "reduced"), [(2, "selective", True), (1, "selective", False), (2, "none", False)]
)
def test_tensor_parallel_sums_are_recomputed_too(
    monkeypatch: pytest.MonkeyPatch, tensor: int, recompute: str, reduced: bool
) -> None:
    built = Built(monkeypatch, "parallel.workers=2", f"parallel.tensor={tensor}", f"train.recompute={recompute}")
    assert ("reduced" in built.calls) == reduced


def test_layers_and_head_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(monkeypatch, "train.compile=true")
    assert {"compiled Layer", "compiled Head"} <= built.calls.keys()
