"""Adapters in peft's format: names, configuration, parts for a layout, refusals, and the merged weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import ROWS
from torch import Tensor

from strata.platform.errors import UserError
from strata.platform.recipe import LoraSection, ModelSection
from strata.training.checkpoint import adapter
from strata.training.parallel.shard_map import Cut, Shard

from ..model.families.folders import imported, save

LORA = LoraSection(rank=3, alpha=6, targets=("q_proj", "down_proj"))
DORA = LORA.model_copy(update={"dora": True})


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> ModelSection:
    return imported(save(ROWS["qwen3"], tmp_path_factory.mktemp("models") / "qwen3"))


def weights(section: ModelSection, lora: LoraSection = LORA) -> dict[str, Tensor]:
    """Random adapter parameters. Projections of this row: q is 32 -> 48, down is 48 -> 32."""
    torch.manual_seed(0)
    found = {}
    for name in adapter.adapted(section, lora):
        outputs, inputs = (48, 32) if "q_proj" in name else (32, 48)
        path = name.removesuffix(".weight")
        found |= {f"{path}.lora_A.weight": torch.randn(3, inputs), f"{path}.lora_B.weight": torch.randn(outputs, 3)}
        found |= {f"{path}.lora_magnitude_vector": torch.rand(outputs)} if lora.dora else {}
    return found


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["LoRA", "DoRA"])
def test_files_are_pefts(section: ModelSection, tmp_path: Path, lora: LoraSection) -> None:
    own = weights(section, lora)
    adapter.write(tmp_path, own.__getitem__, section, lora)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_dora"]) == ("LORA", 3, 6, lora.dora)
    assert config["target_modules"] == ["down_proj", "q_proj"] and config["base_model_name_or_path"] == section.source
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{name}" for name in own}
    assert all(torch.equal(tensors[f"base_model.model.{name}"], weight) for name, weight in own.items())


@pytest.mark.parametrize("cut", [None, Cut(0, 12, 24), Cut(1, 1, 3)])
def test_a_rank_reads_its_part(section: ModelSection, tmp_path: Path, cut: Cut | None) -> None:
    own = weights(section)
    adapter.write(tmp_path, own.__getitem__, section, LORA)
    name = "model.layers.1.self_attn.q_proj.lora_B.weight"
    source, shard = adapter.Adapter(tmp_path, section, LORA), Shard(name, (48, 3), cut, 0)
    local = own[name] if cut is None else own[name].narrow(cut.dim, cut.start, cut.stop - cut.start)
    assert torch.equal(source.read_range(shard, "weight", 2, 9), local.reshape(-1)[2:9])
    assert torch.equal(source.read_range(shard, "exp_avg", 2, 9), torch.zeros(7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"use_dora": True}, "has use_dora=true, and train.lora.dora is false"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "is of a IA3 adapter"),
        ({"r": 4}, "has r=4, and train.lora.rank is 3"),
        ({"lora_alpha": 5}, "has lora_alpha=5, and train.lora.alpha is 6"),
    ],
)
def test_adapters_that_compute_something_else_are_refused(
    section: ModelSection, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    adapter.write(tmp_path, weights(section).__getitem__, section, LORA)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError) as error:
        adapter.Adapter(tmp_path, section, LORA)
    assert message in str(error.value)


def test_magnitudes_are_read_by_rank_and_only_where_they_are_trained(section: ModelSection, tmp_path: Path) -> None:
    own, name = weights(section, DORA), "model.layers.1.self_attn.q_proj.lora_magnitude_vector"
    adapter.write(tmp_path, own.__getitem__, section, DORA)
    read = adapter.Adapter(tmp_path, section, DORA).read_range(Shard(name, (48,), Cut(0, 12, 24), 0), "weight", 2, 9)
    assert torch.equal(read, own[name][14:21])
    with pytest.raises(UserError, match=r"has use_dora=true, and train\.lora\.dora is false"):
        adapter.Adapter(tmp_path, section, LORA)


def test_other_targets_and_missing_files_are_refused(section: ModelSection, tmp_path: Path) -> None:
    adapter.write(tmp_path, weights(section).__getitem__, section, LORA)
    for targets, message in ((("q_proj",), "has no place in this model"), (("q_proj", "down_proj", "k_proj"), "lacks")):
        with pytest.raises(UserError, match=message):
            adapter.Adapter(tmp_path, section, LORA.model_copy(update={"targets": targets}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors cannot be read"):
        adapter.Adapter(tmp_path, section, LORA)
    with pytest.raises(UserError, match=r"adapter_config\.json cannot be read"):
        adapter.Adapter(tmp_path / "absent", section, LORA)


def test_parts_of_a_tensor_have_no_adapter(tmp_path: Path) -> None:
    section = imported(save(ROWS["gpt_oss"], tmp_path / "gpt_oss"))
    assert adapter.adapted(section, LoraSection(targets=("q_proj",)))
    with pytest.raises(UserError, match="it cannot have an adapter"):
        adapter.adapted(section, LoraSection(targets=("q_proj", "up_proj")))


def test_merged_weights_compute_what_both_did(section: ModelSection) -> None:
    own = weights(section)
    name = "model.layers.0.self_attn.q_proj.weight"
    base = {name: torch.randn(48, 32), "model.norm.weight": torch.ones(32)}
    whole = adapter.merging((own | base).__getitem__, [name], LORA)
    x = torch.randn(5, 32)
    a, b = own["model.layers.0.self_attn.q_proj.lora_A.weight"], own["model.layers.0.self_attn.q_proj.lora_B.weight"]
    torch.testing.assert_close(x @ whole(name).T, x @ base[name].T + 2 * (x @ a.T) @ b.T)
    assert whole("model.norm.weight") is base["model.norm.weight"]


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["LoRA", "DoRA"])
def test_peft_loads_the_folder_and_merges_the_same(section: ModelSection, tmp_path: Path, lora: LoraSection) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    own = weights(section, lora)
    adapter.write(tmp_path, own.__getitem__, section, lora)
    model = AutoModelForCausalLM.from_pretrained(section.source, dtype=torch.float32)
    base = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    whole = adapter.merging((own | base).__getitem__, adapter.adapted(section, lora), lora)
    theirs = dict(peft.PeftModel.from_pretrained(model, tmp_path).merge_and_unload().named_parameters())
    for name in base:
        torch.testing.assert_close(whole(name), theirs[name], rtol=1e-5, atol=1e-5)


def test_merged_rows_have_their_magnitudes(section: ModelSection) -> None:
    own, name = weights(section, DORA), "model.layers.0.self_attn.q_proj.weight"
    base = {name: torch.randn(48, 32)}
    rows = adapter.merging((own | base).__getitem__, [name], DORA)(name)
    plain = adapter.merging((own | base).__getitem__, [name], LORA)(name)
    torch.testing.assert_close(rows.norm(dim=1), own["model.layers.0.self_attn.q_proj.lora_magnitude_vector"])
    torch.testing.assert_close(rows / rows.norm(dim=1, keepdim=True), plain / plain.norm(dim=1, keepdim=True))
