"""Weights of an imported model as a source for a load, in any parallel layout, without reading more than a rank's own rows."""

import hashlib
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.model_families import hub, registry, source
from strata.platform.model_families.family import Location
from strata.platform.recipe import ModelSection
from strata.training.checkpoint.tensor_files import INDEX, TensorFiles
from strata.training.parallel.shard_map import Shard

BASE = "base"  # folder in a run with the small files of the model it started from
TENSORS = "tensors.json"
BUFFERS = "buffers.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # those that survive a round trip through fp32
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 1024  # at a time
DIGEST_BLOCKS, DIGEST_BLOCK = 64, 2**16  # blocks of a file, and their bytes


class Pretrained:
    """Source of the weights of a Hugging Face folder, with moments of zero."""

    def __init__(self, folder: Path, section: ModelSection) -> None:
        assert section.family
        self._folder = folder
        self._files = TensorFiles(folder)
        self._locations = registry.named(section.family).tensors(section)
        self._tied = section.tie_embeddings

    def read_range(self, shard: Shard, kind: str, first: int, last: int) -> Tensor:
        """Elements `first` to `last` of a shard, flattened, in fp32."""
        if kind != "weight":
            return torch.zeros(last - first)
        view = part(self._files.view(self._locations[shard.name].tensor), self._locations[shard.name])
        assert tuple(view.shape) == shard.shape, f"{shard.name} is {tuple(view.shape)} in the folder and {shard.shape} here"
        view = shard.of(view)
        if first == last:
            return torch.empty(0)
        width = prod(view.shape[1:])
        top, bottom = first // width, -(-last // width)
        rows = view[top:bottom].to(torch.float32)
        return rows.reshape(-1)[first - top * width : last - top * width]

    def whole(self, name: str) -> Tensor:
        """A whole parameter in fp32."""
        location = self._locations[name]
        return part(self._files.view(location.tensor), location).float()

    def require_complete(self) -> None:
        """Checks names, shapes and dtypes of all tensors, and that each file is as long as its header demands."""
        if self._files.has_index:
            self._files.require_index_matches()
        expected = {location.tensor: location.shape for location in self._locations.values()}
        there = self._files.file_of
        if missing := sorted(expected.keys() - there.keys()):
            fix = "Restore the folder; weights that were saved in another form must be saved by transformers' save_pretrained."
            raise UserError(f"{self._folder} lacks the tensor {missing[0]} ({len(missing)} of {len(expected)} are missing).", fix)
        for name, shape in expected.items():
            if self._files.shape(name) != shape:
                cause = f"{name} in {self._path(name)} has the shape {list(self._files.shape(name))}, not {list(shape)}."
                raise UserError(cause, "The weights and config.json are of different models: restore one of them.")
        self._require_known_surplus(sorted(there.keys() - expected.keys()))
        for name in there:
            if self._files.dtype(name) not in DTYPES:
                fix = f"Save it as one of {', '.join(DTYPES)}, and set model.from to that folder."
                raise UserError(f"{name} in {self._path(name)} has the dtype {self._files.dtype(name)}.", fix)

    def _require_known_surplus(self, surplus: list[str]) -> None:
        for name in surplus:
            if name == HEAD and self._tied:
                self._require_equal(HEAD, EMBEDDING)
            elif not is_buffer(name):
                fix = "Use a folder whose weights are those of its config.json."
                raise UserError(f"{self._path(name)} has the tensor {name}, which the model of config.json does not have.", fix)

    def _require_equal(self, one: str, other: str) -> None:
        """Compares tensors in blocks of rows. Files of a tied model may hold the output layer too."""
        fix = "Correct tie_word_embeddings in config.json: with false, both are trained."
        a, b = self._files.view(one), self._files.view(other)
        blocks = (slice(row, row + COMPARED_ROWS) for row in range(0, b.shape[0], COMPARED_ROWS))
        if a.shape != b.shape or not all(torch.equal(a[block].float(), b[block].float()) for block in blocks):
            raise UserError(f"{one} in {self._path(one)} differs from {other}, and config.json ties them.", fix)

    def _path(self, name: str) -> Path:
        return self._folder / self._files.file_of[name]


def part(tensor: Tensor, location: Location) -> Tensor:
    """View of the elements that are the parameter at a location."""
    view = tensor[location.index] if location.index else tensor
    return view.t() if location.transposed else view


def is_buffer(name: str) -> bool:
    """True if a tensor is a table that models of old versions of transformers saved, and that follows from config.json."""
    return name.endswith(".rotary_emb.inv_freq")


def resolve(given: str) -> Path:
    """Folder with the files of `model.from`; downloads a Hugging Face id."""
    return source.snapshot(given)


def prepare(section: ModelSection, base: Path) -> Path:
    """Resolves and checks the model to import, and copies its small files to `base` for later exports. Returns its folder."""
    assert section.source
    folder = resolve(section.source)
    Pretrained(folder, section).require_complete()
    copy_small_files(folder, base)
    return folder


def require_unchanged(folder: Path, record: Path, run: str, reason: str) -> None:
    """Records the identity of weights that a run needs but does not train, and refuses others when it is resumed."""
    found = weights_digest(folder)
    if record.is_file() and record.read_text() != found:
        cause = f"The weights in {folder} are not those that run '{run}' began with, and {reason}."
        raise UserError(cause, "Restore the weights, or start a new run.")
    write_atomic(record, found)


def weights_digest(folder: Path) -> str:
    """Digest of the sizes of a model's weight files and of blocks at even distances in them: reading all of a large model would
    delay each start. A copy of the folder has the same digest."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(DIGEST_BLOCKS + 1):
                file.seek(max(0, size - DIGEST_BLOCK) * number // DIGEST_BLOCKS)
                digest.update(file.read(DIGEST_BLOCK))
    return digest.hexdigest()


def copy_small_files(folder: Path, to: Path) -> None:
    """Copies what an export needs from a model's folder besides weights: configuration, tokenizer, index, and a list of the
    tensors with their dtypes and files. The list is written last: with it, the copy is complete."""
    files = TensorFiles(folder)
    for path in _small_files(folder):
        write_atomic(to / path.name, path.read_bytes())
    buffers = {name: files.view(name) for name in files.file_of if is_buffer(name)}
    if buffers:
        write_atomic(to / BUFFERS, save(buffers))
    tensors = [
        {"name": name, "dtype": files.dtype(name), "shape": files.shape(name), "file": file}
        for name, file in sorted(files.file_of.items())
    ]
    metadata = {file: files.metadata(file) for file in sorted(set(files.file_of.values()))}
    write_atomic(to / TENSORS, json.dumps({"tensors": tensors, "metadata": metadata}, indent=1))


def _small_files(folder: Path) -> Iterator[Path]:
    names = {path.name: path for pattern in (*hub.SMALL_FILES, INDEX) for path in folder.glob(pattern) if path.is_file()}
    yield from (names[name] for name in sorted(names))


def read_tensors(base: Path) -> dict[str, Any]:
    """List of the original tensors, and the metadata of their files."""
    path = base / TENSORS
    fix = f"Restore {base}: it is needed to export in the form of the original model."
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        assert {"tensors", "metadata"} <= found.keys()
    except FileNotFoundError:
        raise UserError(f"{path} is missing.", fix) from None
    except (ValueError, AssertionError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error}.", fix) from None
    return found
