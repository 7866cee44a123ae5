"""Models with several kinds of KV cache are served without remote prefill."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.serving.models import hybrid_check, model_dir
from strata.serving.runtime import endpoint

FULL, SLIDING = "full_attention", "sliding_attention"


def written(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | config))
    return folder


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"layer_types": [SLIDING, FULL] * 3}, f"{FULL}, {SLIDING}"),  # gpt-oss, Gemma 3
        ({"text_config": {"layer_types": ["linear_attention", FULL]}}, f"{FULL}, linear_attention"),
        ({"layers_block_type": ["mamba", "attention"]}, "attention, mamba"),  # Zamba
        ({"hybrid_override_pattern": "M-M*-"}, "hybrid_override_pattern"),
        ({"text_config": {"attention_chunk_size": 8192}}, "attention_chunk_size"),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096}, "Gemma2ForCausalLM"),
    ],
)
def test_models_with_several_kv_cache_kinds_are_refused(tmp_path: Path, config: dict[str, Any], kinds: str) -> None:
    with pytest.raises(UserError, match=rf"several kinds of KV cache \({kinds}\)") as refused:
        hybrid_check.check_folder(written(tmp_path, **config))
    assert "serve.prefill.replicas=0" in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"layer_types": [FULL] * 6},
        {"sliding_window": 4096},  # Mistral: every layer
        {"use_sliding_window": False, "max_window_layers": 28},  # Qwen 2 as it comes
        {"text_config": {"attention_chunk_size": None}},
    ],
)
def test_models_with_one_kv_cache_kind_are_served(tmp_path: Path, config: dict[str, Any]) -> None:
    hybrid_check.check_folder(written(tmp_path, **config))


def test_hybrid_models_are_served_without_a_prefill_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, layer_types=[SLIDING, FULL])
    monkeypatch.setattr(model_dir, "check", lambda folder: None)
    with pytest.raises(UserError, match="several kinds of KV cache"):
        endpoint.check(recipe_file.load("laptop", []).serve, folder)
    endpoint.check(recipe_file.load("laptop", ["serve.prefill.replicas=0"]).serve, folder)


def test_loaded_configuration_is_checked_again() -> None:
    transformers = pytest.importorskip("transformers")
    hybrid_check.check_loaded(transformers.LlamaConfig(), is_hybrid=False)
    hybrid_check.check_loaded(transformers.Qwen2Config(), is_hybrid=False)
    with pytest.raises(UserError, match=f"{FULL}, {SLIDING}"):
        hybrid_check.check_loaded(transformers.Gemma2Config(num_hidden_layers=4), is_hybrid=False)
    with pytest.raises(UserError, match=f"{FULL}, {SLIDING}"):
        hybrid_check.check_loaded(
            transformers.Qwen2Config(num_hidden_layers=4, use_sliding_window=True, max_window_layers=2), is_hybrid=False
        )
    with pytest.raises(UserError, match="attention and states"):
        hybrid_check.check_loaded(SimpleNamespace(), is_hybrid=True)
