"""Writes a quantized model folder: the source's files with other tensors, and the configuration that vLLM reads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from safetensors.torch import save_file
from torch import Tensor, nn

from strata.platform.errors import UserError
from strata.training.checkpoint.tensor_files import INDEX, TensorFiles
from strata.training.quantization.layers import Plan
from strata.training.quantization.rounding import Stored

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx")
CONFIG = "config.json"
MARGIN = 1.05  # of the estimated size


def require_space(source: Path, target: Path, plan: Plan) -> None:
    """Refuses a disk with too little space, before minutes of work."""
    needed = MARGIN * _estimate(source, plan)
    folder = next(each for each in target.resolve().parents if each.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        cause = f"The quantized model needs about {needed / 1e9:.2g} GB, and {folder} has {free / 1e9:.2g} GB free."
        raise UserError(cause, "Free some space there, or choose another disk with --to.")


def require_names(source: Path, plan: Plan) -> None:
    """Refuses a folder whose tensors have other names than the layers in transformers: they could not be replaced."""
    there = TensorFiles(source).file_of
    missing = next((name for name in plan.quantized if f"{name}.weight" not in there), None)
    if missing:
        cause = f"{source} stores the weights of {missing} under another name, so they cannot be replaced."
        raise UserError(cause, "Load it in transformers, save it with save_pretrained, and name that folder.")


def write(source: Path, target: Path, plan: Plan, stored: Stored, changed: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """`stored`: tensors of quantized layers. `changed`: other tensors, by name, that differ from the source. The configuration is
    written last: a folder without it is not a model."""
    files = TensorFiles(source)
    index: dict[str, str] = {}
    size = 0
    for file in sorted(set(files.file_of.values())):
        tensors: dict[str, Tensor] = {}
        for name in files.names_in(file):
            layer = name.removesuffix(".weight")
            if name.endswith(".weight") and layer in stored:
                tensors |= {f"{layer}.{key}": tensor for key, tensor in stored[layer].items()}
            else:
                tensor = changed[name] if name in changed else files.view(name)
                tensors[name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        save_file(tensors, target / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if files.has_index:
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}, indent=2)
        (target / INDEX).write_text(text)
    _copy_others(source, target)
    (target / CONFIG).write_text(json.dumps(_config(source, plan, dtype), indent=2))


def _copy_others(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation defaults and the card. Folders, such as an adapter's, belong to the source only."""
    for file in sorted(source.iterdir()):
        weights = file.name.endswith(WEIGHTS) or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != CONFIG and not file.name.startswith("."):
            shutil.copyfile(file, target / file.name)


def _config(source: Path, plan: Plan, dtype: torch.dtype) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((source / CONFIG).read_text())
    values.pop("torch_dtype", None)  # the former name of dtype
    scheme = plan.format.scheme(plan.group_size, plan.head)
    scheme.format = infer_module_format(nn.Linear, scheme).value
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=sorted(plan.left),
    )
    return values | {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization.model_dump(mode="json")}


def _estimate(source: Path, plan: Plan) -> float:
    """Bytes of the folder: quantized weights with their scales, everything else in 16 bits."""
    files = TensorFiles(source)
    total = 0.0
    for name in files.file_of:
        numbers = 1
        for length in files.shape(name):
            numbers *= length
        bits: float = 16
        if name.removesuffix(".weight") in plan.quantized:
            bits = plan.format.bits + (20 / plan.group_size if plan.group_size else 0.1)
        total += numbers * bits / 8
    return total
