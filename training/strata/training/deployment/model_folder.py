"""Loads a Hugging Face folder for export, and refuses models that have no decoder step with a KV cache."""

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from strata.platform.errors import UserError, shown
from strata.platform.model_families.source import read_config

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
LAYERS = {"full_attention", "sliding_attention"}
BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings whose frequencies change with the length of the input
SUPPORTED = "Use a text model with attention and a KV cache in each layer, such as those of docs/models.md."


def require_exportable(folder: Path) -> None:
    """Refuses by the configuration, before the weights are read."""
    values = read_config(str(folder))
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise UserError(f"{folder} has no weights: no {' or '.join(WEIGHTS)}.", "Name a complete Hugging Face folder.")
    if "quantization_config" in values:
        raise _refused(folder, "its weights are quantized", "Use the model's unquantized weights.")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds, by the key that is wrong
        raise _refused(folder, shown(f"transformers cannot read its config.json: {error}", 300)) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refused(folder, f"model_type={config.model_type} is not a decoder that generates text")
    generator = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    if config.architectures and generator not in config.architectures:
        raise _refused(folder, f"its architecture {shown(config.architectures[0])} is not {generator}, which generates text")
    if config.get_text_config(decoder=True) is not config:
        raise _refused(folder, "it is multimodal, and an export has token ids as its only input")
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYERS
    if unknown:
        raise _refused(folder, f"its layers of type {', '.join(sorted(unknown))} have no KV cache of keys and values")
    for kind in _rope_kinds(getattr(config, "rope_parameters", None) or {}):
        if kind in BY_LENGTH:
            reason = f"rope_type={kind} computes other frequencies for longer inputs, which a graph cannot"
            fix = "Set the rotary embedding in config.json to one that is the same for all lengths, such as yarn or default."
            raise _refused(folder, reason, fix)


def load(folder: Path, dtype: str, device: str) -> Any:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors raise many kinds for a damaged folder
        cause = f"The model in {folder} cannot be loaded: {shown(f'{type(error).__name__}: {error}', 200)}"
        raise UserError(cause, "Export it again, or name another folder.") from error
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"The weights in {folder} are incomplete: {shown(names, 200)} missing.", "Restore the folder.")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _refused(folder, f"{type(model).__name__} takes no position_ids, an input of exported models")
    return model.to(device).eval().requires_grad_(False)


def context_of(model: Any) -> int:
    return int(getattr(model.config, "max_position_embeddings", 0) or 2048)


def _rope_kinds(parameters: dict[str, Any]) -> list[str]:
    """Types of rotary embeddings: one, or one for each type of layer."""
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    return [str(each.get("rope_type", "default")) for each in (*nested, parameters)]


def _refused(folder: Path, reason: str, fix: str = SUPPORTED) -> UserError:
    return UserError(f"The model in {folder} cannot be exported: {reason}.", fix)
