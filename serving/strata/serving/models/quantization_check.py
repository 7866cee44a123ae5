"""Refuses quantized weights that vLLM has no kernel for on a CPU, before engines start: it would fail in the first request.

Written for vLLM 0.29. GPUs from Turing on have kernels for every format that `strata quantize` writes.
"""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError
from strata.platform.hardware.machine import cpu_flags
from strata.platform.recipe import ServeSection

PACKED, INT8, FP8 = "pack-quantized", "int-quantized", "float-quantized"  # formats of compressed-tensors
MULTIPLE = 32  # of inputs and outputs, in kernels of packed weights
SIZES = ("hidden_size", "intermediate_size")
OTHER_FORMAT = "Set serve.device=gpu, or quantize the model again: strata quantize --format w8a8-fp8"
VNNI = frozenset({"avx512_vnni", "avx_vnni"})


def check_folder(section: ServeSection, folder: Path) -> None:
    check_config(section, json.loads((folder / "config.json").read_text()))


def check_config(section: ServeSection, config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if section.device != "cpu" or not isinstance(quantization, dict):
        return
    if quantization.get("quant_method") != "compressed-tensors":
        return
    if quantization.get("format") == PACKED:
        _check_packed(section, config, quantization)
    elif quantization.get("format") == INT8 and not int8_is_exact():
        raise UserError(
            "This CPU has no VNNI instructions, and without them sums of int8 products overflow in vLLM's kernel.",
            OTHER_FORMAT,
        )
    elif quantization.get("format") not in (INT8, FP8):
        cause = f"vLLM has no kernel on a CPU for weights in the format {quantization.get('format')}."
        raise UserError(cause, OTHER_FORMAT)


def int8_is_exact() -> bool:
    """False for an x86 CPU on which oneDNN adds pairs of int8 products in 16 bits."""
    return platform.machine() != "x86_64" or bool(VNNI & cpu_flags())


def _check_packed(section: ServeSection, config: Mapping[str, Any], quantization: Mapping[str, Any]) -> None:
    groups = quantization.get("config_groups") or {}
    bits = {str((group.get("weights") or {}).get("num_bits")) for group in groups.values()}
    if bits - {"4"}:
        cause = f"vLLM has no kernel on a CPU for packed weights of {', '.join(sorted(bits - {'4'}))} bits."
        raise UserError(cause, OTHER_FORMAT)
    dtype = config.get("dtype", config.get("torch_dtype")) if section.dtype == "auto" else section.dtype
    if dtype == "float32":
        cause = f"vLLM's CPU kernel of 4-bit weights computes in 16 bits, and serve.dtype={section.dtype} is float32 here."
        raise UserError(cause, "Set serve.dtype=bfloat16.")
    odd = next((key for key in SIZES if (config.get(key) or 0) % MULTIPLE), None)
    if odd:
        cause = f"vLLM's CPU kernel of 4-bit weights needs multiples of {MULTIPLE}, and {odd}={config[odd]}."
        raise UserError(cause, OTHER_FORMAT)
