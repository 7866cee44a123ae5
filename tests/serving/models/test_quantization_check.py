"""Quantized weights that vLLM cannot compute on a CPU are refused before engines start."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.serving.models import model_dir, quantization_check
from strata.serving.runtime import endpoint
from strata.serving.runtime.models import checks


def config(format: str, bits: int = 4, method: str = "compressed-tensors", **more: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits}}
    quantization = {"quant_method": method, "format": format, "config_groups": {"group_0": group}}
    sizes = {"hidden_size": 128, "intermediate_size": 384, "dtype": "bfloat16"}
    return {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization} | sizes | more


@pytest.mark.parametrize(
    ("given", "dtype", "reason"),
    [
        (config("pack-quantized"), "float32", "serve.dtype=float32"),
        (config("pack-quantized", dtype="float32"), "auto", "serve.dtype=auto is float32"),
        (config("pack-quantized", bits=8), "bfloat16", "8 bits"),
        (config("pack-quantized", intermediate_size=100), "bfloat16", "intermediate_size=100"),
        (config("nvfp4-pack-quantized"), "bfloat16", "nvfp4-pack-quantized"),
    ],
)
def test_formats_without_a_cpu_kernel_are_refused(given: dict[str, Any], dtype: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        quantization_check.check_config(recipe_file.load("laptop", [f"serve.dtype={dtype}"]).serve, given)
    gpu = recipe_file.load("laptop", [f"serve.dtype={dtype}", "serve.device=gpu"]).serve
    quantization_check.check_config(gpu, given)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "float32"),
        (config("pack-quantized"), "bfloat16"),
        (config("pack-quantized"), "auto"),
        (config("float-quantized", bits=8), "float32"),
        (config("any", method="fp8"), "float32"),  # vLLM's own check decides
    ],
)
def test_others_are_served(given: dict[str, Any], dtype: str) -> None:
    quantization_check.check_config(recipe_file.load("laptop", [f"serve.dtype={dtype}"]).serve, given)


@pytest.mark.parametrize(
    ("machine", "flag", "served"), [("x86_64", "avx512_vnni", True), ("x86_64", "sse", False), ("arm64", "", True)]
)
def test_int8_needs_products_that_do_not_overflow(machine: str, flag: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(quantization_check, "cpu_flags", lambda: frozenset({flag}))
    with nullcontext() if served else pytest.raises(UserError, match="VNNI"):
        quantization_check.check_config(recipe_file.load("laptop", []).serve, config("int-quantized", bits=8))


def test_an_endpoint_checks_it_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("pack-quantized")))
    monkeypatch.setattr(model_dir, "check", lambda folder: None)
    with pytest.raises(UserError, match=r"serve\.dtype") as refused:
        endpoint.check(recipe_file.load("laptop", []).serve, tmp_path)
    assert "serve.dtype=bfloat16" in refused.value.fix
    checks.check_folder(recipe_file.load("laptop", ["serve.dtype=bfloat16"]).serve, tmp_path)
