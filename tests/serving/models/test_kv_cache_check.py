"""fp8 KV caches that vLLM cannot compute on a CPU are refused before engines start."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection
from strata.serving.models import kv_cache_check, model_dir
from strata.serving.runtime import endpoint

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_attention_heads": 4}
AVX512 = "avx512f avx512bw avx512dq avx512vl"


def section(*words: str) -> ServeSection:
    return recipe_file.load("laptop", [f"serve.{word}" for word in words]).serve


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CONFIG, None),
        (CONFIG | {"head_dim": 64}, None),
        (CONFIG | {"head_dim": 48}, "has 48"),
        (CONFIG | {"hidden_size": 64}, "has 16"),
        ({"text_config": CONFIG | {"head_dim": 80}}, "has 80"),
        ({"architectures": ["LlamaForCausalLM"]}, None),  # vLLM's own check decides
    ],
)
def test_heads_are_whole_vectors(config: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_check, "cpu_flags", lambda: frozenset(AVX512.split()))
    with nullcontext() if reason is None else pytest.raises(UserError, match=reason):
        kv_cache_check.check_config(section("kv_cache_dtype=fp8"), config)
    kv_cache_check.check_config(section(), config)
    kv_cache_check.check_config(section("kv_cache_dtype=fp8", "device=gpu"), config)


@pytest.mark.parametrize(
    ("flags", "served"), [(AVX512, True), (f"{AVX512} amx_tile", True), ("avx512f avx2", False), ("", False)]
)
def test_cpus_without_the_instructions(flags: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arm CPUs have no flags of that name."""
    monkeypatch.setattr(kv_cache_check, "cpu_flags", lambda: frozenset(flags.split()))
    with nullcontext() if served else pytest.raises(UserError, match="AVX-512"):
        kv_cache_check.check_config(section("kv_cache_dtype=fp8"), CONFIG)


def test_an_endpoint_checks_it_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 80}))
    monkeypatch.setattr(model_dir, "check", lambda folder: None)
    with pytest.raises(UserError, match=r"serve\.kv_cache_dtype=fp8") as refused:
        endpoint.check(section("kv_cache_dtype=fp8"), tmp_path)
    assert "serve.kv_cache_dtype=auto" in refused.value.fix
