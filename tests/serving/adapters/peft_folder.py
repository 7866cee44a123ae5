"""Folders with a tiny base model and adapters in peft's format, without weights that a model could compute with."""

import json
import struct
from pathlib import Path
from typing import Any

INPUTS, OUTPUTS, RANK = 8, 6, 4
TARGET = "model.layers.0.self_attn.q_proj"


def safetensors(shapes: dict[str, list[int]], fill: bytes = b"\0") -> bytes:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + fill * end


def base(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(safetensors({f"{TARGET}.weight": [OUTPUTS, INPUTS]}))
    return folder


def adapter(folder: Path, fill: bytes = b"\0", rank: int = RANK, inputs: int = INPUTS, target: str = TARGET, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "base_model_name_or_path": "some/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config | more))
    shapes = {
        f"base_model.model.{target}.lora_A.weight": [rank, inputs],
        f"base_model.model.{target}.lora_B.weight": [OUTPUTS, rank],
    }
    (folder / "adapter_model.safetensors").write_bytes(safetensors(shapes, fill))
    return folder
