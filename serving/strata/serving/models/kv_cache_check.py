"""Refuses fp8 KV caches that vLLM has no kernel for on a CPU, before engines start.

Written for vLLM 0.29, whose attention on a CPU stores fp8 on x86 with AVX-512 only, for heads of whole vectors. On GPUs vLLM
checks the attention backend itself, and names the reason.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError
from strata.platform.hardware.machine import cpu_flags
from strata.platform.recipe import ServeSection
from strata.serving.models.head_size_check import head_size

AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
HEAD_SIZE_STEP = 32
FIX = "Set serve.kv_cache_dtype=auto."


def check_folder(section: ServeSection, folder: Path) -> None:
    check_config(section, json.loads((folder / "config.json").read_text()))


def check_config(section: ServeSection, config: Mapping[str, Any]) -> None:
    if section.device != "cpu" or section.kv_cache_dtype != "fp8":
        return
    if not cpu_flags() >= AVX512:
        raise UserError("serve.kv_cache_dtype=fp8 needs AVX-512 instructions, which this CPU does not have.", FIX)
    size = head_size(config.get("text_config") or config)
    if size is not None and size % HEAD_SIZE_STEP:
        cause = f"serve.kv_cache_dtype=fp8 on a CPU needs heads of a multiple of {HEAD_SIZE_STEP}, and this model has {size}."
        raise UserError(cause, FIX)
