"""Is this a folder vLLM can load? Asked before any process starts: a truncated file should cost no minute of start-up."""

import json
from pathlib import Path

from strata.platform.errors import UserError

FIX = "Give a Hugging Face model folder: config.json, *.safetensors and a tokenizer ('strata export RUN' writes one)."


def check(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"There is no model folder {folder}.", FIX)
    config = _json(folder / "config.json")
    if not config.get("architectures"):
        raise UserError(f"{folder / 'config.json'} names no architecture, so vLLM cannot tell what model this is.", FIX)
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(f"{folder} holds no weights (*.safetensors).", FIX)
    for file in weights:
        _check_safetensors(file)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{folder} holds no tokenizer.", FIX)


def weights_gib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**30


def _json(path: Path) -> dict[str, object]:
    try:
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no model folder: it has no {path.name}.", FIX) from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}", FIX) from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no JSON object.", FIX)
    return tree


def _check_safetensors(file: Path) -> None:
    """The header says where the last tensor ends; a file cut short by a full disk or a broken copy ends before that."""
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
        raise UserError(f"{file} is damaged: it has {size} bytes where its header says {expected}.", "Export or copy it again.")
