"""Refuses models whose heads have a width that vLLM's attention on CPUs lacks. An engine would end at its first request."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError

ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's CPU_ATTN
LATENT = "kv_lora_rank"  # key of models with latent attention, whose heads vLLM widens


def check_folder(folder: Path) -> None:
    """For engines on CPUs."""
    config = json.loads((folder / "config.json").read_text())
    width = head_size(config.get("text_config") or config)
    if width is not None and width not in ON_CPU:
        sizes = ", ".join(map(str, ON_CPU))
        cause = f"This model's heads are {width} wide, and vLLM's attention on CPUs has only the widths {sizes}."
        raise UserError(
            cause, "Serve it on a GPU (serve.device=gpu), or train one with model.hidden / model.heads of such a width."
        )


def head_size(config: Mapping[str, Any]) -> int | None:
    """None if config.json does not tell: its class has a default."""
    if config.get(LATENT):
        return None
    if width := config.get("head_dim"):
        return int(width)
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if hidden and heads else None
