"""Checks that vLLM, or the sampler of pictures, can load a model folder, before any process starts."""

import json
from pathlib import Path

from strata.platform.errors import UserError

FIX = "Use a Hugging Face model folder: config.json, *.safetensors and a tokenizer ('strata export RUN' writes one)."

PICTURES = "model_index.json"  # of a diffusion model


def check(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"There is no model folder {folder}.", FIX)
    if makes_pictures(folder):
        raise UserError(f"{folder} has a model of pictures, not of text.", "Serve it with 'strata serve' on one Ray cluster.")
    config = _json(folder / "config.json")
    if not config.get("architectures"):
        raise UserError(f"{folder / 'config.json'} has no 'architectures', which vLLM needs to select the model class.", FIX)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(f"{folder} has no weights (*.safetensors).", FIX)
    for file in weights:
        check_safetensors(file)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{folder} has no tokenizer.", FIX)


def makes_pictures(folder: Path) -> bool:
    """True for a diffusion model in diffusers' layout."""
    return (folder / PICTURES).is_file()


def check_pictures(folder: Path) -> None:
    """The components' own classes check the rest when they load."""
    if not _json(folder / PICTURES).get("_class_name"):
        raise UserError(f"{folder / PICTURES} names no _class_name.", "Export or download the model again.")
    weights = sorted(folder.glob("*/*.safetensors"))
    if not weights:
        raise UserError(f"{folder} has no weights (*/*.safetensors).", "Export or download the model again.")
    for file in weights:
        check_safetensors(file)


def weights_gib(folder: Path) -> float:
    """Weights of the folder and of its components."""
    patterns = ("*.safetensors", "*/*.safetensors") if makes_pictures(folder) else ("*.safetensors",)
    return sum(file.stat().st_size for pattern in patterns for file in folder.glob(pattern)) / 2**30


def _json(path: Path) -> dict[str, object]:
    try:
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a model folder: it has no {path.name}.", FIX) from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}", FIX) from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a JSON object.", FIX)
    return tree


def check_safetensors(file: Path) -> None:
    """Compares the file size with the end of the last tensor in the header, to find truncated files."""
    if not file.is_file():
        raise UserError(f"There is no {file}.", "Export or copy it again.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(header_size)) if 2 <= header_size <= size - 8 else None
        except ValueError:
            header = None
    if header is None:
        raise UserError(f"{file} is damaged: its safetensors header is not readable.", "Export or copy it again.")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + header_size + max(ends, default=0)
    if size != expected:
        raise UserError(
            f"{file} is damaged: it has {size} bytes, but its header requires {expected}.", "Export or copy it again."
        )
