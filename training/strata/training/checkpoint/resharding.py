"""Reading of a checkpoint in another parallel layout than the one that wrote it.

A rank asks for the shards of its own layout. The reader assembles each from the stored ranges that overlap it.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strata.training.checkpoint.format import Checkpoint, Stored
from strata.training.parallel.shard_map import Cut, Shard


class Reader:
    """Reads shards of any layout from a checkpoint of any other."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        self._stored: dict[tuple[str, str], list[tuple[str, Stored]]] = {}
        for manifest in checkpoint.manifests:
            for stored in manifest.stored:
                self._stored.setdefault((stored.name, stored.kind), []).append((manifest.file, stored))
        self._files: dict[str, Any] = {}

    def names(self) -> list[str]:
        return sorted({name for name, _ in self._stored})

    def read(self, shard: Shard, kind: str) -> Tensor:
        parts = self._parts(shard, kind)
        if all(stored.cut == shard.cut for _, stored in parts):
            return self._filled(parts, shard, 0, shard.numel).view(shard.local_shape)
        whole = torch.empty(shard.shape)
        for cut in {stored.cut for _, stored in parts}:
            same = replace(shard, cut=cut)
            values = self._filled([(file, s) for file, s in parts if s.cut == cut], same, 0, same.numel)
            _narrow(whole, cut).copy_(values.view(same.local_shape))
        return _narrow(whole, shard.cut).contiguous()

    def read_range(self, shard: Shard, kind: str, first: int, last: int) -> Tensor:
        """Elements `first` to `last` of a shard, flattened. Reads nothing else if the checkpoint has the same cut."""
        parts = self._parts(shard, kind)
        if all(stored.cut == shard.cut for _, stored in parts):
            return self._filled(parts, shard, first, last)
        return self.read(shard, kind).flatten()[first:last]

    def whole(self, name: str, kind: str = "weight") -> Tensor:
        """Whole weight, for an export."""
        shape = self._stored[name, kind][0][1].shape
        return self.read(Shard(name, shape, None, 0), kind)

    def _parts(self, shard: Shard, kind: str) -> list[tuple[str, Stored]]:
        parts = [(file, s) for file, s in self._stored[shard.name, kind] if _overlap(s.cut, shard.cut)]
        shape = parts[0][1].shape
        assert shape == shard.shape, f"{shard.name} is {shape} in the checkpoint and {shard.shape} here"
        return parts

    def _filled(self, parts: list[tuple[str, Stored]], shard: Shard, first: int, last: int) -> Tensor:
        flat, filled = torch.empty(last - first), 0
        for file, stored in parts:
            low, high = max(first, stored.start), min(last, stored.start + stored.count)
            if low >= high:
                continue
            data = self._read_at(file, stored.at + 4 * (low - stored.start), 4 * (high - low))
            flat[low - first : high - first] = torch.from_numpy(np.frombuffer(data, np.float32).copy())
            filled += high - low
        assert filled == last - first, f"{shard.name} is incomplete in the checkpoint"
        return flat

    def _read_at(self, file: str, at: int, count: int) -> bytes:
        if file not in self._files:
            self._files[file] = self._folder.open(file)
        data: bytes = self._files[file].read_at(count, at)
        return data


def _narrow(whole: Tensor, cut: Cut | None) -> Tensor:
    return whole if cut is None else whole.narrow(cut.dim, cut.start, cut.stop - cut.start)


def _overlap(one: Cut | None, other: Cut | None) -> bool:
    if one is None or other is None or one.dim != other.dim:
        return True
    return one.start < other.stop and other.start < one.stop
