"""Checks of shapes, configs of Hugging Face, training programs and failure rates of fleets."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from strata.planner.catalogue import huggingface, library
from strata.planner.catalogue.check_shape import check_shape
from strata.planner.catalogue.fleets import FLEETS, LLAMA3_COUNTS, Rates
from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.catalogue.software import PROGRAMS, program
from strata.planner.layout import Layout
from strata.planner.plan import plan_training, state_bytes, usual_storage
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.recipe import ModelSection, MoESection

SHAPE = Shape("mine", layers=3, hidden=64, heads=6, kv_heads=2, head_dim=16, ffn=160, vocab=512, context=128)
EXPERTS = Experts(count=8, top_k=2, ffn=32)
LATENT = Latent(query_rank=3, kv_rank=4, plain_dim=5, rotary_dim=6, value_dim=7)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 112,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
QWEN = LLAMA | {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 17,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 3,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 512}


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("part", "name", "least", "most"),
    [
        (None, "layers", 1, 1000),
        (None, "hidden", 1, 1_000_000),
        (None, "heads", 2, 65_536),  # a multiple of two key heads
        (None, "kv_heads", 1, 6),
        (None, "head_dim", 1, 65_536),
        (None, "ffn", 1, 10_000_000),
        (None, "vocab", 1, 100_000_000),
        (None, "context", 1, 100_000_000),
        ("experts", "count", 2, 65_536),
        ("experts", "top_k", 1, 8),
        ("experts", "ffn", 1, 10_000_000),
        ("experts", "shared_ffn", 0, 10_000_000),
        ("experts", "dense_layers", 0, 2),
        ("latent", "query_rank", 0, 1_000_000),
        ("latent", "kv_rank", 1, 1_000_000),
        ("latent", "plain_dim", 1, 65_536),
        ("latent", "rotary_dim", 0, 65_536),
        ("latent", "value_dim", 1, 65_536),
    ],
)
def test_ranges_of_a_shape(part: str | None, name: str, least: int, most: int) -> None:
    whole = replace(SHAPE, experts=EXPERTS, latent=LATENT)

    def changed(value: int) -> Shape:
        if part:
            return replace(whole, **{part: replace(getattr(whole, part), **{name: value})})
        return replace(whole, **{name: value})

    for value in (least, most):
        assert check_shape(changed(value)) == changed(value)
    for value in (least - 1, most + 1):
        with pytest.raises(UserError):
            check_shape(changed(value))


@pytest.mark.parametrize(
    ("shape", "cause"),
    [
        (replace(SHAPE, kv_heads=4), "The 6 heads of the model mine are not a multiple of its 4 key/value heads"),
        (replace(SHAPE, experts=replace(EXPERTS, top_k=9)), "chooses 9 experts, and there are 8"),
        (replace(SHAPE, experts=replace(EXPERTS, dense_layers=3)), "The first 3 of the 3 layers of the model mine are dense"),
        (replace(SHAPE, layers=0), "The model mine has layers=0, which is out of range"),
    ],
)
def test_invalid_shapes_are_refused(shape: Shape, cause: str) -> None:
    with pytest.raises(UserError, match=re.escape(cause)):
        check_shape(shape)


def test_a_recipe_has_the_shape_of_its_sections() -> None:
    section = ModelSection(layers=4, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=512, context=32, tie_embeddings=True)
    dense = library.from_recipe(section, "mine")
    assert dense == Shape("mine", 4, 64, 4, 2, 16, 160, 512, 32, tied=True)
    shared = section.model_copy(update={"moe": MoESection(experts=8, top_k=3, shared_ffn=96)})
    assert library.from_recipe(shared, "mine").experts == Experts(8, 3, 160, 96, shared_gate=True)
    bare = section.model_copy(update={"moe": MoESection(experts=8, top_k=3)})
    assert library.from_recipe(bare, "mine").experts == Experts(8, 3, 160, 0, shared_gate=False)


# ---------------------------------------------------------------- Hugging Face


def read(config: dict[str, Any]) -> Shape:
    return huggingface.from_config(config, "mine")


def test_a_llama() -> None:
    assert read(LLAMA) == Shape("mine", 3, 64, 4, 4, 16, 112, 512, 128)
    assert read(LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True}) == Shape(
        "mine", 3, 64, 4, 2, 16, 112, 512, 128, tied=True
    )
    assert read(LLAMA | {"head_dim": 24}).head_dim == 24
    assert type(read(LLAMA).head_dim) is int
    assert read(LLAMA | {"model_type": "qwen2"}).query_biases


def test_a_mixture_of_qwen() -> None:
    assert read(QWEN).experts == Experts(4, 2, 32)
    assert read(QWEN | {"mlp_only_layers": [1, 0]}).experts == Experts(4, 2, 32, dense_layers=2)
    assert read(QWEN | {"mlp_only_layers": None}).experts == Experts(4, 2, 32)
    second = QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48}
    found = read(second)
    assert found.experts == Experts(4, 2, 32, 48, shared_gate=True) and found.query_biases
    for wrong in ([1], [0, 2], "all", 3):
        with pytest.raises(UserError, match="mlp_only_layers"):
            read(QWEN | {"mlp_only_layers": wrong})
    assert read(QWEN | {"decoder_sparse_step": 1}).experts
    with pytest.raises(UserError, match="decoder_sparse_step=3"):
        read(QWEN | {"decoder_sparse_step": 3})


def test_a_mixtral() -> None:
    found = read(LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 3})
    assert found.experts == Experts(8, 3, 112)


def test_a_deepseek() -> None:
    found = read(DEEPSEEK)
    assert found.latent == Latent(24, 17, 16, 8, 12)
    assert found.experts == Experts(4, 2, 32, 96, 1)
    assert (found.head_dim, found.kv_heads) == (24, 4)
    assert read(DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": None}).latent == Latent(0, 17, 16, 8, 12)
    assert read(DEEPSEEK | {"n_shared_experts": None}).experts == Experts(4, 2, 32, 0, 1)
    assert read(DEEPSEEK | {"n_shared_experts": 0}).experts == Experts(4, 2, 32, 0, 1)
    with pytest.raises(UserError, match="n_shared_experts=-1"):
        read(DEEPSEEK | {"n_shared_experts": -1})
    with pytest.raises(UserError, match="moe_layer_freq=2"):
        read(DEEPSEEK | {"moe_layer_freq": 2})


def test_a_gpt2() -> None:
    assert read(GPT2) == Shape("mine", 3, 64, 4, 4, 16, 256, 512, 128, gated=False, tied=True, biases=True, positions=True)
    assert read(GPT2 | {"n_inner": 100, "tie_word_embeddings": False}).ffn == 100
    assert not read(GPT2 | {"tie_word_embeddings": False}).tied
    neox = read(LLAMA | {"model_type": "gpt_neox"})
    assert (neox.gated, neox.biases, neox.positions, neox.tied) == (False, True, False, False)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"hidden_size": 66}, "4 heads do not divide the 66 hidden numbers"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"vocab_size": 512.0}, "vocab_size=512.0"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 in the config of mine is neither true nor false"),
        ({"tie_word_embeddings": "no"}, "neither true nor false"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({"model_type": 3}, "model_type 3"),
    ],
)
def test_invalid_configs_are_refused(change: dict[str, Any], cause: str) -> None:
    with pytest.raises(UserError, match=re.escape(cause)):
        read(LLAMA | change)


def test_indivisible_heads_are_fine_with_a_head_dim() -> None:
    assert read(LLAMA | {"hidden_size": 66, "head_dim": 20}).head_dim == 20


def test_large_files_are_not_configs(tmp_path: Path) -> None:
    """Up to 16 MiB are read."""
    path = tmp_path / "config.json"
    text = '{"model_type": "mamba"}'
    path.write_text(text + " " * (2**24 - len(text)))
    with pytest.raises(UserError, match="model_type 'mamba'"):
        library.open_model(str(path))
    path.write_text(text + " " * (2**24 - len(text) + 1))
    with pytest.raises(UserError, match="has 16,777,217 bytes"):
        library.open_model(str(path))


def test_names_are_those_of_files_or_folders(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "b.json").write_text(json.dumps(LLAMA))
    assert library.open_model(str(tmp_path / "a" / "config.json")).name == "a"
    assert library.open_model(str(tmp_path / "b.json")).name == "b"
    with pytest.raises(UserError, match="is not a file"):
        (tmp_path / "c.json").mkdir()
        library._read_json(tmp_path / "c.json")
    with pytest.raises(UserError, match="no model of the catalogue"):
        library.open_model("")


# ---------------------------------------------------------------- programs and fleets


def test_programs() -> None:
    names = ("attention", "dropout", "gradient_bytes", "overlaps_data", "overlaps_tensor", "selective", "fused_loss")
    assert {name: tuple(getattr(each, key) for key in names) for name, each in PROGRAMS.items()} == {
        "megatron-2021": ("unfused", True, 2, False, False, "core", False),
        "megatron-2022": ("unfused", True, 2, False, False, "core", False),
        "megatron-core": ("flash", False, 2, True, True, "core", False),
        "torch-fsdp": ("flash", False, 4, True, False, "half", False),
        "strata": ("flash", False, 2, True, False, "streams", True),
        "strata-torch": ("flash", False, 2, True, False, "streams", False),
        "strata-eager": ("flash", False, 2, True, False, "streams", False),
    }
    with pytest.raises(UserError, match="There is no program 'megatron'"):
        program("megatron")


def test_published_failure_rates() -> None:
    """Mean time between failures, in hours, as the papers print it."""
    assert sum(LLAMA3_COUNTS.values()) == 419
    assert 1 / (16384 * FLEETS["llama3"].total) == pytest.approx(54 * 24 / 419)
    assert FLEETS["llama3"].hardware / FLEETS["llama3"].total == pytest.approx((419 - 54 - 7 - 2) / 419)
    assert 1 / (16384 * FLEETS["rsc-1"].total) == pytest.approx(1.8, rel=0.01)
    assert 1 / (1024 * FLEETS["rsc-1-jobs"].total) == pytest.approx(7.9)
    assert FLEETS["rsc-1-jobs"].total / FLEETS["rsc-1"].total == pytest.approx(3.6, rel=0.02)
    assert 1 / (8 * 24 * 1000 * FLEETS["rsc-2"].total) == pytest.approx(1 / 2.34)
    some = Rates("mine", "", {"a": 1.0, "b": 2.0, "c": 4.0}, frozenset({"b"}))
    assert (some.total, some.hardware) == (7, 5)
    assert set(FLEETS) == {"llama3", "rsc-1", "rsc-1-jobs", "rsc-2"}


@pytest.mark.parametrize(
    ("cause", "count"),
    [
        ("faulty GPU", 148),
        ("GPU HBM3 memory", 72),
        ("software bug", 54),
        ("network switch or cable", 35),
        ("host maintenance", 32),
        ("GPU SRAM", 19),
        ("GPU system processor", 17),
        ("network card", 7),
        ("NCCL watchdog timeout", 7),
        ("silent data corruption", 6),
        ("GPU thermal interface and sensor", 6),
        ("SSD", 3),
        ("power supply", 3),
        ("server chassis", 2),
        ("IO expansion board", 2),
        ("dependency", 2),
        ("CPU", 2),
        ("system memory", 2),
    ],
)
def test_interruptions_of_llama3_by_cause(cause: str, count: int) -> None:
    assert FLEETS["llama3"].per_gpu_hour[cause] * 54 * 24 * 16384 == pytest.approx(count)


# ---------------------------------------------------------------- layouts and plans


def test_gpus_and_micro_batches_of_a_layout() -> None:
    layout = Layout(data=2, tensor=3, pipeline=5, sequence=7, context=11, micro_batch=4, batch=50)
    assert layout.gpus == 2 * 3 * 5 * 7 * 11
    assert layout.micro_batches == 6  # 50 // 8
    numbers = {field.name: field.default for field in fields(Layout) if type(field.default) is int}
    assert all(value == 1 for value in numbers.values())
    assert not Layout().sequence_parallel


def test_bytes_of_a_checkpoint_and_of_its_store() -> None:
    assert state_bytes(SHAPE, "fp32") == 12 * SHAPE.parameters()
    assert state_bytes(SHAPE, "bf16") == state_bytes(SHAPE, "fp8") == 14 * SHAPE.parameters()
    assert usual_storage(16384) == 2e12
    assert usual_storage(8) == pytest.approx(976.6e6, rel=1e-3)


def test_a_plan_has_its_parts() -> None:
    shape = replace(SHAPE, heads=4, kv_heads=2)
    gpu, fabric = hardware.gpu("h100"), hardware.fabric("ndr-400")
    layout = Layout(data=8, batch=16)
    plan = plan_training(shape, layout, 96, gpu, fabric, program("megatron-core"), tokens=1e9)
    assert plan.memory.capacity == gpu.memory and plan.budget is not None
    bare = plan_training(shape, layout, 96, gpu, fabric, program("megatron-core"))
    assert bare.budget is None and bare.step == plan.step
    slow = plan_training(shape, layout, 96, gpu, fabric, program("megatron-core"), storage=1.0)
    assert slow.failures.goodput < bare.failures.goodput
    usual = plan_training(shape, layout, 96, gpu, fabric, program("megatron-core"), storage=8 * 2e12 / 16384)
    assert usual.failures.goodput == bare.failures.goodput
