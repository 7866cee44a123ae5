"""Refuses disaggregated prefill for hybrid models, whose layers have different kinds of KV cache.

Full attention caches every token, a sliding window the last few, a state space model a state. vLLM has a cache group for each
kind. With more than one, blocks that NIXL transfers can belong to another prompt: a wrong answer without an error
(vllm-project/vllm 52234).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError

# Keys of config.json that list the kind of each layer, and keys that only hybrid models have.
LISTED = ("layer_types", "layers_block_type")
ONLY_IF_MIXED = (
    "hybrid_override_pattern",  # Nemotron-H
    "attn_layer_period",  # Jamba
    "attn_layer_indices",  # Bamba
    "full_attention_interval",  # Qwen3-Next
    "attention_chunk_size",  # Llama 4
    "sliding_window_pattern",  # Gemma 3, Cohere 2
)
ALTERNATING = ("Gemma2ForCausalLM",)  # hybrid, but config.json may not have such a key


def check_folder(folder: Path) -> None:
    """Checks config.json before anything starts."""
    check_config(json.loads((folder / "config.json").read_text()))


def check_config(config: Mapping[str, Any]) -> None:
    text = config.get("text_config") or config
    kinds = _kinds(text) or next((name for name in ONLY_IF_MIXED if text.get(name)), None)
    _refuse(kinds or next((name for name in ALTERNATING if name in config.get("architectures", ())), None))


def check_loaded(text_config: Any, is_hybrid: bool) -> None:
    """Checks vLLM's loaded configuration, in which transformers has filled in defaults that config.json omits."""
    _refuse(_kinds(vars(text_config)) or ("attention and states" if is_hybrid else None))


def _kinds(config: Mapping[str, Any]) -> str | None:
    for name in LISTED:
        if len(kinds := set(config.get(name) or ())) > 1:
            return ", ".join(sorted(map(str, kinds)))
    return None


def _refuse(kinds: str | None) -> None:
    if kinds is not None:
        raise UserError(
            f"This model has several kinds of KV cache ({kinds}). With a prefill pool, a prompt can get the answer of another "
            "(vllm-project/vllm 52234).",
            "Set serve.prefill.replicas=0.",
        )
