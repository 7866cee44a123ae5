"""Folder of a Llama without weights: its configuration alone, which vLLM's loader of random weights needs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError

HEAD = "lm_head"
GROUP = 128  # input columns that share a scale, of the scheme W4A16
FORMATS = {"W4A16": "pack-quantized", "FP8_DYNAMIC": "float-quantized"}


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int

    def require_supported(self) -> None:
        for name, size in (("--hidden", self.hidden), ("--ffn", self.ffn)):
            if size % GROUP:
                raise UserError(f"{name} {size} is not a multiple of {GROUP}, the group of W4A16.", f"Change {name}.")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            cause = f"--hidden {self.hidden}, --heads {self.heads} and --kv-heads {self.kv_heads} do not divide each other."
            raise UserError(cause, "Make the hidden size a multiple of the heads, and these of the KV heads.")


def write(folder: Path, shape: Shape, preset: str | None, head: bool, context: int) -> None:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    if preset is not None:
        config["quantization_config"] = _quantization(preset, head)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _quantization(preset: str, head: bool) -> dict[str, Any]:
    """As `strata quantize` writes it."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear", *([HEAD] if head else [])])
    scheme.format = FORMATS[preset]
    made = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[] if head else [HEAD],
    )
    found: dict[str, Any] = made.model_dump(mode="json")
    return found
