"""Memory-mapped safetensors files of a model folder: one file, or several with an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from strata.platform.errors import UserError, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "Restore the file, or download the model again."


class TensorFiles:
    """Tensors of a folder by name. Opens a file when one of its tensors is first used; a tensor is a view of the file, so only
    the rows that are read reach memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.has_index = not (folder / SINGLE).is_file()  # of both forms, transformers too reads the single file
        self.file_of: Mapping[str, str] = self._indexed() if self.has_index else dict.fromkeys(self.names_in(SINGLE), SINGLE)

    def names_in(self, file: str) -> list[str]:
        return list(self._opened(file).keys())

    def metadata(self, file: str) -> dict[str, str]:
        return self._opened(file).metadata() or {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._opened(self.file_of[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Name of the dtype in the file, such as BF16."""
        dtype: str = self._opened(self.file_of[name]).get_slice(name).get_dtype()
        return dtype

    def view(self, name: str) -> Tensor:
        tensor: Tensor = self._opened(self.file_of[name]).get_tensor(name)
        return tensor

    def require_index_matches(self) -> None:
        """Compares the index with the files: each has the tensors that the index expects there, and no others."""
        for file in sorted(set(self.file_of.values())):
            there = set(self.names_in(file))
            expected = {name for name, each in self.file_of.items() if each == file}
            if missing := sorted(expected - there):
                raise UserError(f"{self.folder / file} lacks the tensor {missing[0]}, which {INDEX} expects in it.", AGAIN)
            if surplus := sorted(there - expected):
                raise UserError(f"{self.folder / file} has the tensor {surplus[0]}, which {INDEX} does not expect in it.", AGAIN)

    def _indexed(self) -> dict[str, str]:
        path = self.folder / INDEX
        if not path.is_file():
            raise self._no_weights()
        try:
            weights: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged: {shown(repr(error), 120)}.", AGAIN) from None
        plain = isinstance(weights, dict) and all(isinstance(file, str) and Path(file).name == file for file in weights.values())
        if not plain or not weights:
            raise UserError(f"{path} is damaged: its weight_map does not list tensors and files of this folder.", AGAIN)
        return weights

    def _no_weights(self) -> UserError:
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in self.folder.glob(pattern))
        if others:
            fix = "Convert it: load it in transformers, save it with save_pretrained, and set model.from to that folder."
            return UserError(f"{self.folder} has no safetensors files, only {others[0]}.", fix)
        return UserError(f"{self.folder} has neither {SINGLE} nor {INDEX}.", AGAIN)

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            try:
                self._open[file] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise UserError(f"{path} is missing, and {INDEX} expects tensors in it.", AGAIN) from None
            except SafetensorError as error:
                raise UserError(f"{path} is damaged or truncated: {shown(error, 120)}.", AGAIN) from None
        return self._open[file]
