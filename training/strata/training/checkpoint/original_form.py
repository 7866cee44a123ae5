"""Writes an imported model's weights in the form of the original: its names, dtypes, files and small files."""

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from strata.platform.model_families import registry
from strata.platform.recipe import ModelSection
from strata.training.checkpoint.pretrained import BUFFERS, DTYPES, EMBEDDING, HEAD, TENSORS, is_buffer, part, read_tensors


def write_original_form(folder: Path, base: Path, weight: Callable[[str], Tensor], section: ModelSection) -> None:
    """Writes one file after the other: memory holds one file and one parameter. `weight` returns a whole parameter by name."""
    original = read_tensors(base)
    for path in base.iterdir():
        if path.name not in (TENSORS, BUFFERS):
            shutil.copyfile(path, folder / path.name)
    filled = _parameters_by_tensor(section)
    for file, metadata in original["metadata"].items():
        entries = [entry for entry in original["tensors"] if entry["file"] == file]
        tensors = {entry["name"]: _tensor(entry, filled, weight, base, section) for entry in entries}
        save_file(tensors, folder / file, metadata or None)


def _parameters_by_tensor(section: ModelSection) -> dict[str, list[tuple[str, Any]]]:
    assert section.family
    by_tensor: dict[str, list[tuple[str, Any]]] = {}
    for parameter, location in registry.named(section.family).tensors(section).items():
        by_tensor.setdefault(location.tensor, []).append((parameter, location))
    return by_tensor


def _tensor(
    entry: dict[str, Any],
    filled: dict[str, list[tuple[str, Any]]],
    weight: Callable[[str], Tensor],
    base: Path,
    section: ModelSection,
) -> Tensor:
    name = entry["name"]
    if is_buffer(name):
        with safe_open(base / BUFFERS, framework="pt") as buffers:
            buffer: Tensor = buffers.get_tensor(name)
            return buffer
    tied = name == HEAD and section.tie_embeddings
    tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
    count = 0
    for parameter, location in filled[EMBEDDING if tied else name]:
        view = part(tensor, location)
        view.copy_(weight(parameter))
        count += view.numel()
    assert count == prod(entry["shape"]), f"{name} has {prod(entry['shape'])} elements, of which {count} are parameters"
    return tensor
