"""Reads of a checkpoint's shards against slices of the whole parameter, for every pair of layouts."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.training.checkpoint import format
from strata.training.checkpoint.format import Origin, examine
from strata.training.checkpoint.resharding import Reader
from strata.training.checkpoint.storage import folder
from strata.training.parallel.optimizer_state import Fragment
from strata.training.parallel.shard_map import Cut, Shard

SHAPE = (6, 10)
WHOLE = torch.arange(1.0, 61.0).view(SHAPE)
LAYOUTS = {
    "whole": [None],
    "rows": [Cut(0, 0, 2), Cut(0, 2, 4), Cut(0, 4, 6)],
    "columns": [Cut(1, 0, 5), Cut(1, 5, 10)],
    "uneven columns": [Cut(1, 0, 3), Cut(1, 3, 9), Cut(1, 9, 10)],
}


def part_of(whole: Tensor, cut: Cut | None) -> Tensor:
    if cut is None:
        return whole
    selected = slice(cut.start, cut.stop)
    return whole[selected] if cut.dim == 0 else whole[:, selected]


def save(target: Path, cuts: list[Cut | None], whole: Tensor = WHOLE, fragments: int = 3) -> Reader:
    """Writes a rank for each cut, with its elements in several fragments, last fragment first, after another parameter."""
    for rank, cut in enumerate(cuts):
        shard, flat = Shard("w", SHAPE, cut, 0), part_of(whole, cut).flatten()
        bounds = [flat.numel() * number // fragments for number in range(fragments + 1)]
        parts = [Fragment(Shard("a", (2,), None, 0), "weight", 0, torch.tensor([70.0, 71.0]))]
        ranges = list(pairwise(bounds))[::-1]
        parts += [
            Fragment(shard, kind, a, flat[a:b] * sign) for kind, sign in (("weight", 1), ("exp_avg", -1)) for a, b in ranges
        ]
        format.write(folder(target), rank, len(cuts), 1, Origin({}, "", 1, 0), None, parts)
    return Reader(examine(folder(target)))


@pytest.mark.parametrize("wanted", [cut for cuts in LAYOUTS.values() for cut in cuts] + [Cut(0, 1, 5), Cut(1, 2, 6)], ids=str)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_shard_is_read_from_every_layout(tmp_path: Path, saved: str, wanted: Cut | None) -> None:
    reader, shard = save(tmp_path, LAYOUTS[saved]), Shard("w", SHAPE, wanted, 0)
    expected = part_of(WHOLE, wanted)
    assert torch.equal(reader.read(shard, "weight"), expected)
    assert torch.equal(reader.read(shard, "exp_avg"), -expected)
    assert reader.read(shard, "weight").is_contiguous()
    size = expected.numel()
    for first, last in ((0, size), (0, 1), (size - 1, size), (size // 4, size // 2 + 1), (3, 3)):
        assert torch.equal(reader.read_range(shard, "weight", first, last), expected.flatten()[first:last])


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("saved", LAYOUTS)
def test_whole_weights_are_read_for_an_export(tmp_path: Path, saved: str, fragments: int) -> None:
    reader = save(tmp_path, LAYOUTS[saved], fragments=fragments)
    assert reader.names() == ["a", "w"]
    assert torch.equal(reader.whole("w"), WHOLE)


def reads(reader: Reader, monkeypatch: pytest.MonkeyPatch, shard: Shard, first: int, last: int) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []
    whole = Reader._read_at
    monkeypatch.setattr(Reader, "_read_at", lambda self, *at: made.append(at) or whole(self, *at))
    reader.read_range(shard, "weight", first, last)
    return made


def test_range_reads_only_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has 20 elements in fragments 13-20, 6-13 and 0-6, after 2 other elements: at bytes 8, 36 and 64."""
    reader = save(tmp_path, LAYOUTS["rows"])
    for first, last, expected in ((8, 15, [(8, 8), (44, 20)]), (13, 20, [(8, 28)]), (0, 6, [(64, 24)])):
        with monkeypatch.context() as patch:
            found = reads(reader, patch, Shard("w", SHAPE, Cut(0, 2, 4), 0), first, last)
        assert found == [("part-00001.bin", *at) for at in expected]


def test_only_files_that_overlap_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 1 to 2 are in the first of three files, rows 1 to 3 in two of them, and a column is in all."""
    reader = save(tmp_path, LAYOUTS["rows"], fragments=1)
    for cut, files in (
        (Cut(0, 1, 2), "0"),
        (Cut(0, 1, 3), "01"),
        (Cut(0, 2, 4), "1"),
        (Cut(0, 4, 5), "2"),
        (Cut(1, 0, 1), "012"),
    ):
        with monkeypatch.context() as patch:
            found = reads(reader, patch, Shard("w", SHAPE, cut, 0), 0, 1)
        assert {name for name, _, _ in found} == {f"part-0000{number}.bin" for number in files}


def test_checkpoint_without_some_elements_is_refused(tmp_path: Path) -> None:
    shard = Shard("w", SHAPE, None, 0)
    parts = [Fragment(shard, "weight", 0, WHOLE.flatten()[:59])]
    format.write(folder(tmp_path), 0, 1, 1, Origin({}, "", 1, 0), None, parts)
    reader = Reader(examine(folder(tmp_path)))
    assert torch.equal(reader.read_range(shard, "weight", 9, 59), WHOLE.flatten()[9:59])
    for first, last in ((0, 60), (59, 60)):
        with pytest.raises(AssertionError, match="w is incomplete in the checkpoint"):
            reader.read_range(shard, "weight", first, last)


def test_parameter_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"w is \(6, 10\) in the checkpoint and \(10, 6\) here"):
        save(tmp_path, [None]).read(Shard("w", (10, 6), None, 0), "weight")
