"""`serve.adapter=apart`: adapters that vLLM computes otherwise than peft are refused, and settings reach engines and gateways."""

import json
from pathlib import Path
from typing import Any

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection
from strata.serving.models import adapter
from strata.serving.spec import EngineSpec, GatewaySpec, Network

NETWORK = Network.within(one_machine=True)
APART = ServeSection(adapter="apart")
EMPTY = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A merged model with an adapter beside it, and its base model."""
    for folder in (tmp_path / "base", tmp_path / "export"):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        (folder / "model.safetensors").write_bytes(EMPTY)
        (folder / "tokenizer.json").write_text("{}")
    write(tmp_path / "export", {})
    (tmp_path / "export" / "adapter" / "adapter_model.safetensors").write_bytes(EMPTY)
    return tmp_path / "export"


def write(export: Path, change: dict[str, Any]) -> None:
    folder = export / "adapter"
    folder.mkdir(exist_ok=True)
    base = str(export.parent / "base")
    config = {"peft_type": "LORA", "r": 12, "lora_alpha": 24.0, "bias": "none", "base_model_name_or_path": base}
    neutral = {"use_dora": False, "rank_pattern": {}, "alpha_pattern": None, "modules_to_save": None, "use_rslora": True}
    (folder / "adapter_config.json").write_text(json.dumps(config | neutral | change))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"use_dora": True}, "use_dora=True, which vLLM does not compute"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8}"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern={'q_proj': 8}"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "IA3"}, "of a IA3 adapter"),
        ({"r": 513}, "r=513, and vLLM's adapters have ranks from 1 to 512"),
        ({"r": "8"}, "r='8'"),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"base_model_name_or_path": "/no/such/folder"}, "is not there: model.from=/no/such/folder"),
    ],
)
def test_other_adapters_are_refused_with_the_fix(export: Path, change: dict[str, Any], cause: str) -> None:
    write(export, change)
    with pytest.raises(UserError) as refusal:
        adapter.check(APART, export)
    assert cause in refusal.value.cause and "serve.adapter=merged" in refusal.value.fix


def test_export_without_an_adapter_is_refused(export: Path) -> None:
    with pytest.raises(UserError, match="has no adapter"):
        adapter.read(export.parent / "base")


def test_folders_are_checked(export: Path) -> None:
    assert adapter.check(APART, export).base == export.parent / "base"
    (export / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"There is no .*adapter_model"):
        adapter.check(APART, export)


def test_mixture_of_experts_on_cpus_is_refused(export: Path) -> None:
    (export.parent / "base" / "config.json").write_text(json.dumps({"architectures": ["M"], "num_experts": 4}))
    with pytest.raises(UserError, match="mixtures of experts on CPUs"):
        adapter.check(APART, export)
    adapter.check(ServeSection(adapter="apart", device="gpu"), export)


def test_engine_has_the_base_with_the_adapter(export: Path) -> None:
    spec = EngineSpec.of("decode", APART, export, "tuned", NETWORK)
    assert (spec.model_dir, spec.tokenizer_dir) == (str(export.parent / "base"), str(export))
    assert spec.adapter is not None and spec.adapter.folder == export / "adapter"
    kwargs = spec.engine_kwargs()
    assert (kwargs["enable_lora"], kwargs["max_lora_rank"]) == (True, 16)
    merged = EngineSpec.of("decode", ServeSection(), export, "tuned", NETWORK)
    assert merged.model_dir == merged.tokenizer_dir == str(export)
    assert merged.adapter is None and "enable_lora" not in merged.engine_kwargs()


def test_gateway_has_both_names() -> None:
    assert GatewaySpec.of(APART, "tuned", NETWORK).names == ("tuned", "base")
    assert GatewaySpec.of(ServeSection(), "tuned", NETWORK).names == ("tuned",)
    with pytest.raises(UserError, match="has the name 'base'"):
        GatewaySpec.of(APART, "base", NETWORK)


def test_lora_arguments_are_not_set_by_hand() -> None:
    with pytest.raises(recipe_file.RecipeError, match="'enable_lora' is not set here"):
        recipe_file.load("laptop", ["serve.engine={enable_lora: true}"])
