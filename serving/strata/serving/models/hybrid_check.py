"""Which models cannot be handed over from engine to engine: those whose layers keep their context in different ways.

Full attention keeps every token, a sliding window the last few, a state space a state. vLLM has a cache for each kind, and where
there is more than one, blocks that NIXL moves can be another prompt's: a wrong answer, and no error (vllm-project/vllm 52234).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError

# Where a config.json says what each layer is, and what it only has if layers are of several kinds.
LISTED = ("layer_types", "layers_block_type")
ONLY_IF_MIXED = (
    "hybrid_override_pattern",  # Nemotron-H
    "attn_layer_period",  # Jamba
    "attn_layer_indices",  # Bamba
    "full_attention_interval",  # Qwen3-Next
    "attention_chunk_size",  # Llama 4
    "sliding_window_pattern",  # Gemma 3, Cohere 2
)
ALTERNATING = ("Gemma2ForCausalLM",)  # whose config.json may not say so


def check_folder(folder: Path) -> None:
    """Before anything starts, by what the model's folder says."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or config
    kinds = _kinds(text) or next((name for name in ONLY_IF_MIXED if text.get(name)), None)
    _refuse(kinds or next((name for name in ALTERNATING if name in config["architectures"]), None))


def check_loaded(text_config: Any, is_hybrid: bool) -> None:
    """In the engine's process, by what vLLM made of it: transformers fills in what a config.json leaves out."""
    _refuse(_kinds(vars(text_config)) or ("attention and states" if is_hybrid else None))


def _kinds(config: Mapping[str, Any]) -> str | None:
    for name in LISTED:
        if len(kinds := set(config.get(name) or ())) > 1:
            return ", ".join(sorted(map(str, kinds)))
    return None


def _refuse(kinds: str | None) -> None:
    if kinds is not None:
        raise UserError(
            f"This model's layers keep their context in several ways ({kinds}); handed over from engine to engine, prompts can "
            "get each other's answers (vllm-project/vllm 52234). Without a prefill pool it is served.",
            "Set serve.prefill.replicas=0.",
        )
