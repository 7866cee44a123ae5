import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import starts_fast

from strata.planner.catalogue import huggingface, library
from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.hardware import catalogue_file
from strata.platform.hardware.specs import Fabric, Gpu

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 112,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
GROUPED = TINY | {"num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_group": 1, "topk_group": 1}

# Every family, with the parameters per layer that `Shape` leaves out: norms of queries and keys, and the gate of Qwen2-MoE's
# shared expert.
CONFIGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", GROUPED, 0),
    "llama, tied": ("llama", GROUPED | {"tie_word_embeddings": True}, 0),
    "llama, wide heads": ("llama", GROUPED | {"head_dim": 32}, 0),
    "llama, no kv heads": ("llama", TINY, 0),
    "mistral": ("mistral", GROUPED | {"head_dim": None}, 0),
    "qwen2": ("qwen2", GROUPED, 0),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 32}, 2 * 32),
    "qwen2_moe": ("qwen2_moe", GROUPED | QWEN_EXPERTS | {"shared_expert_intermediate_size": 48}, 0),
    "qwen3_moe": ("qwen3_moe", GROUPED | QWEN_EXPERTS | {"head_dim": 32, "mlp_only_layers": [0]}, 2 * 32),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, 0),
    "deepseek_v2": ("deepseek_v2", TINY | LATENT | SPARSE | {"q_lora_rank": 24, "n_shared_experts": 2}, 0),
    "deepseek_v2-lite": ("deepseek_v2", TINY | LATENT | SPARSE | {"q_lora_rank": None, "n_shared_experts": 2}, 0),
    "deepseek_v3": ("deepseek_v3", TINY | LATENT | SPARSE | GROUPS | {"q_lora_rank": 24, "n_shared_experts": 1}, 0),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 512}, 0),
    "gpt_neox": ("gpt_neox", TINY, 0),
}


def within(count: int, published_b: float) -> bool:
    """Tolerance: 1%, and 2% where the figure is published to two digits."""
    digits = len(f"{published_b:g}".replace(".", "").strip("0"))
    return abs(count / 1e9 / published_b - 1) <= (0.01 if digits > 2 else 0.02)


@pytest.mark.parametrize("name", library.model_names())
def test_parameters_equal_the_published(name: str) -> None:
    shape, published = library.model(name), library.published(name)
    assert (published.parameters is None) == (name == "1t-moe")
    assert published.parameters is None or within(shape.parameters(), published.parameters)
    assert published.active is None or within(shape.active_parameters(), published.active)
    assert (published.active is not None) == (shape.experts is not None and name != "1t-moe")


def test_the_invented_model_has_a_trillion_parameters() -> None:
    assert library.model("1t-moe").parameters() == pytest.approx(1e12, rel=0.01)


@pytest.mark.parametrize("name", library.model_names())
def test_head_counts_are_consistent(name: str) -> None:
    shape = library.model(name)
    assert shape.heads % shape.kv_heads == 0
    assert shape.name == name
    if not shape.latent and not name.startswith("qwen3"):
        assert shape.heads * shape.head_dim == shape.hidden


@pytest.mark.parametrize("name", hardware.gpu_names())
def test_gpus_are_plausible(name: str) -> None:
    """Detects a wrong power of ten in one field by comparison with the others."""
    gpu = hardware.gpu(name)
    dense = gpu.flops["fp16"]
    assert 100e12 < dense < 3e15
    assert gpu.flops["fp32"] < dense
    assert gpu.flops.get("bf16", dense) == dense
    assert gpu.flops.get("fp8", 2 * dense) == pytest.approx(2 * dense, rel=0.02)
    assert gpu.flops.get("tf32", dense / 2) == pytest.approx(dense / 2, rel=0.02)
    assert 30e9 < gpu.memory < 300e9
    assert 10 < gpu.memory / gpu.bandwidth * 1e3 < 60  # milliseconds to read the whole memory
    assert gpu.pcie <= gpu.link < gpu.bandwidth / 5
    assert 0.5 < gpu.reachable < 1
    assert 0.5 < gpu.dollars_per_hour < 20
    assert 250 <= gpu.watts <= 1200
    assert gpu.domain == (72 if name == "gb200" else 8)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Ascend910B2", "ascend-910b"),
    ],
)
def test_gpus_by_driver_name(device: str, name: str) -> None:
    assert hardware.device_named(device) == hardware.gpu(name)


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA GH200 480GB",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H800 PCIe",
        "Tesla V100-SXM2-16GB",
    ],
)
def test_similar_cards_have_peak_rates_and_are_not_planned_for(device: str) -> None:
    found = hardware.device_named(device)
    assert found and not isinstance(found, Gpu) and not hardware.has_gpu(found.name)


def test_reachable_equals_the_measurement() -> None:
    a100, h100 = hardware.gpu("a100-80gb"), hardware.gpu("h100-sxm")
    assert a100.reachable * a100.flops["bf16"] == pytest.approx(271e12, rel=0.01)
    assert h100.reachable * h100.flops["bf16"] == pytest.approx(795e12, rel=0.01)


@pytest.mark.parametrize("name", hardware.fabric_names())
def test_fabrics_are_plausible(name: str) -> None:
    fabric = hardware.fabric(name)
    assert 10e9 <= fabric.nic <= 100e9
    assert fabric.nics in (1, 2, 4, 8, 16, 32, 72)
    assert fabric.oversubscription >= 1


def test_fabric_figures() -> None:
    assert hardware.fabric("ndr-400") == Fabric("ndr-400", nic=400e9 / 8, nics=8, kind="infiniband", topology="rail")
    assert hardware.fabric("roce-400-3to1").oversubscription == 3


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("llama_3.1_8b", "llama-3.1-8b"),
        ("LLAMA318B", "llama-3.1-8b"),
        ("DeepSeek V3", "deepseek-v3"),
        ("GPT3", "gpt-3-175b"),
        ("gpt3 1.3b", "gpt-3-1.3b"),
        ("gpt3 13b", "gpt-3-13b"),  # must not match 1.3b without its dot
    ],
)
def test_names_are_matched_in_any_spelling(written: str, name: str) -> None:
    assert library.model(written).name == name
    assert library.open_model(written).name == name


def test_gpus_and_fabrics_have_short_names() -> None:
    assert hardware.gpu("H100") == hardware.gpu("h100-sxm")
    assert hardware.gpu("A100") == hardware.gpu("a100-80gb")
    assert hardware.fabric("NDR 400").name == "ndr-400"


def test_errors_for_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UserError, match="no model 'lama-3-8b'") as caught:
        library.model("lama-3-8b")
    assert "llama-3-8b" in caught.value.fix
    with pytest.raises(UserError, match="no GPU 'h10'") as caught:
        hardware.gpu("h10")
    assert "h100-sxm" in caught.value.fix
    with pytest.raises(UserError, match="no fabric 'roce'") as caught:
        hardware.fabric("roce")
    assert "roce-400" in caught.value.fix
    with pytest.raises(UserError, match="no recipe") as caught:
        library.open_model("laptop-mow")
    assert "laptop-moe" in caught.value.fix
    with pytest.raises(UserError) as caught:
        hardware.gpu("???")
    assert all(name in caught.value.fix for name in hardware.gpu_names())


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_have_the_parameters_transformers_builds(case: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, values, left_out = CONFIGS[case]
    config = AutoConfig.for_model(family, **values)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    shape = huggingface.from_config({"model_type": family} | values, case)
    assert shape.parameters() + shape.layers * left_out == sum(weight.numel() for weight in built.parameters())


def test_every_family_is_compared() -> None:
    assert {family for family, _, _ in CONFIGS.values()} == set(huggingface.FAMILIES)


def test_a_config_has_the_shape_of_the_catalogue() -> None:
    """Keys of the published config.json of DeepSeek-V3 that the planner reads."""
    config = {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "tie_word_embeddings": False,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    assert huggingface.from_config(config, "deepseek-v3") == library.model("deepseek-v3")


def test_configs_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(UserError, match="model_type 'mamba'") as caught:
        huggingface.from_config({"model_type": "mamba"}, "mine")
    assert all(family in caught.value.fix for family in huggingface.FAMILIES)
    with pytest.raises(UserError, match="model_type None"):
        huggingface.from_config({}, "mine")
    without = {key: value for key, value in GROUPED.items() if key != "intermediate_size"}
    with pytest.raises(UserError, match="config of mine lacks 'intermediate_size'"):
        huggingface.from_config({"model_type": "llama"} | without, "mine")
    with pytest.raises(UserError, match="lacks 'head_dim'"):
        huggingface.from_config({"model_type": "qwen3"} | GROUPED, "mine")
    with pytest.raises(UserError, match=r"vocab_size='big' .* is not a whole number"):
        huggingface.from_config({"model_type": "llama"} | GROUPED | {"vocab_size": "big"}, "mine")
    mixed = {"model_type": "qwen3_moe"} | GROUPED | QWEN_EXPERTS
    with pytest.raises(UserError, match="mlp_only_layers"):
        huggingface.from_config(mixed | {"mlp_only_layers": [1]}, "mine")
    with pytest.raises(UserError, match="decoder_sparse_step=2"):
        huggingface.from_config(mixed | {"decoder_sparse_step": 2}, "mine")


def test_a_model_is_opened_from_files(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | GROUPED))
    (tmp_path / "other.json").write_text(json.dumps({"model_type": "llama"} | GROUPED))
    (tmp_path / "mine.yaml").write_text("extends: laptop\nmodel: {layers: 3}\n")
    shape = library.open_model(str(folder))
    assert (shape.name, shape.layers, shape.kv_heads, shape.head_dim) == ("my-llama", 3, 2, 16)
    assert library.open_model(str(folder / "config.json")) == shape
    assert library.open_model(str(tmp_path / "other.json")) == replace(shape, name="other")
    recipe = library.open_model(str(tmp_path / "mine.yaml"))
    assert recipe == replace(library.open_model("laptop"), name="mine", layers=3)


def test_errors_for_unreadable_files_have_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json cannot be read: No such file"):
        library.open_model(str(tmp_path))
    broken, listed = tmp_path / "broken.json", tmp_path / "list.json"
    broken.write_text("{")
    listed.write_text("[]")
    with pytest.raises(UserError, match="not valid JSON"):
        library.open_model(str(broken))
    with pytest.raises(UserError, match="holds a list"):
        library.open_model(str(listed))
    with pytest.raises(UserError, match="No recipe"):
        library.open_model(str(tmp_path / "absent.yaml"))


def test_entries_of_the_catalogue_are_checked(tmp_path: Path) -> None:
    shape = "layers: 1, hidden: 8, heads: 1, kv_heads: 1, head_dim: 8, ffn: 8, vocab: 8, context: 8"
    nested = (
        "experts: {count: 2, top_k: 1, ffn: 4}, latent: {query_rank: 1, kv_rank: 2, plain_dim: 3, rotary_dim: 4, value_dim: 5}"
    )
    file = tmp_path / "models.yaml"

    def read(text: str) -> Shape:
        file.write_text(text)
        return catalogue_file.parse(catalogue_file.read(file), Shape, file.name, library.PARTS).find("model", "mine")

    assert read(f"mine: {{{shape}, {nested}}}") == Shape(
        "mine", 1, 8, 1, 1, 8, 8, 8, 8, experts=Experts(2, 1, 4), latent=Latent(1, 2, 3, 4, 5)
    )
    with pytest.raises(UserError, match=r"models.yaml: mine has no field 'wdith'"):
        read(f"mine: {{{shape}, wdith: 3}}")
    with pytest.raises(UserError, match=r"mine.experts has no field 'topk'"):
        read(f"mine: {{{shape}, experts: {{count: 2, topk: 1, ffn: 4}}}}")
    with pytest.raises(UserError, match="mine: layers: "):
        read(f"mine: {{{shape.replace('layers: 1', 'layers: many')}}}")
    with pytest.raises(UserError, match="mine: context: Field required"):
        read(f"mine: {{{shape.replace(', context: 8', '')}}}")
    with pytest.raises(UserError, match="yours has the name 'Mine' of mine"):
        read(f"mine: {{{shape}}}\nyours: {{{shape}, also: [Mine]}}")
    file.write_text("mine: {published_parameters_b: 3}")
    with pytest.raises(UserError, match="has no field 'published_parameters_b'"):
        catalogue_file.parse(catalogue_file.read(file), Gpu, file.name)


@pytest.mark.slow
def test_startup_is_fast_and_without_torch() -> None:
    code = (
        "import sys; from strata.planner.catalogue import library; from strata.platform.hardware import catalogue as hardware; "
        "library.model('gpt-3'); hardware.gpu('h100'); "
        "hardware.fabric('ndr-400'); "
        "assert not {'torch', 'ray', 'numpy', 'transformers'} & set(sys.modules)"
    )
    assert starts_fast(sys.executable, "-c", code)
