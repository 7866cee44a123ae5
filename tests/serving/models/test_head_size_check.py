"""Models with heads that vLLM's attention on CPUs lacks are refused before an engine starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.serving.models import head_size_check, model_dir, quantization_check
from strata.serving.runtime.models import checks


def test_widths_are_those_of_vllm() -> None:
    assert list(head_size_check.ON_CPU) == CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"hidden_size": 128, "num_attention_heads": 8}, 16),
        ({"head_dim": 48, "hidden_size": 512, "num_attention_heads": 8}, 48),
        ({"text_config": {"hidden_size": 960, "num_attention_heads": 8}}, 120),
    ],
)
def test_other_widths_are_refused(tmp_path: Path, config: dict[str, Any], width: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"heads are {width} wide") as refused:
        head_size_check.check_folder(tmp_path)
    assert "serve.device=gpu" in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 4096, "num_attention_heads": 32},
        {"head_dim": 256, "hidden_size": 640, "num_attention_heads": 4},
        {"head_dim": 24, "kv_lora_rank": 512},
        {"n_embd": 768},  # the class decides
    ],
)
def test_known_widths_pass(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    head_size_check.check_folder(tmp_path)


def test_gpus_have_other_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 48}))
    monkeypatch.setattr(model_dir, "check", lambda folder: None)
    monkeypatch.setattr(quantization_check, "check_folder", lambda section, folder: None)
    checks.check_folder(recipe_file.load("h200", ["serve.prefill.replicas=0"]).serve, tmp_path)
    with pytest.raises(UserError, match="48 wide"):
        checks.check_folder(recipe_file.load("laptop", ["serve.prefill.replicas=0"]).serve, tmp_path)
