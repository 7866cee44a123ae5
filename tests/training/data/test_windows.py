import json
from pathlib import Path

import numpy as np
import pytest

from strata.training.data.windows import Windows

# Shards of 10, 3, 0, 7, 4 and 1 tokens. A window of 3 tokens needs one more, so they have 3, 0, 0, 2, 1 and 0 windows.
SHARDS = [list(range(100 * number, 100 * number + size)) for number, size in enumerate((10, 3, 0, 7, 4, 1))]
WINDOWS = [
    [0, 1, 2, 3],
    [3, 4, 5, 6],
    [6, 7, 8, 9],
    [300, 301, 302, 303],
    [303, 304, 305, 306],
    [400, 401, 402, 403],
]


@pytest.fixture
def windows(tmp_path: Path) -> Windows:
    return write(tmp_path, SHARDS, 3)


def write(folder: Path, tokens: list[list[int]], context: int) -> Windows:
    for number, shard in enumerate(tokens):
        (folder / f"train-{number:05}.bin").write_bytes(np.array(shard, "uint16").tobytes())
    sizes = [len(shard) for shard in tokens]
    meta = {"dtype": "uint16", "documents": {}, "shards": {"train": sizes, "validation": []}, "digest": "", "notes": []}
    (folder / "meta.json").write_text(json.dumps(meta))
    return Windows(folder, "train", context)


def test_every_window_in_order(windows: Windows) -> None:
    assert len(windows) == len(WINDOWS)
    assert windows.read(np.arange(len(WINDOWS))).tolist() == WINDOWS


def test_windows_are_read_in_the_requested_order(windows: Windows) -> None:
    read = windows.read(np.array([5, 0, 3, 0]))
    assert read.dtype == np.int64
    assert read.tolist() == [WINDOWS[5], WINDOWS[0], WINDOWS[3], WINDOWS[0]]


@pytest.mark.parametrize(
    ("count", "indices"), [(1, [0]), (2, [0, 5]), (3, [0, 2, 5]), (4, [0, 1, 3, 5]), (6, [*range(6)]), (7, [*range(6)])]
)
def test_evaluation_windows(windows: Windows, count: int, indices: list[int]) -> None:
    assert windows.evenly(count).tolist() == indices


def test_split_without_a_whole_window(tmp_path: Path) -> None:
    assert len(write(tmp_path, [[1, 2, 3]], 3)) == 0
    assert len(write(tmp_path, [[1, 2, 3, 4]], 3)) == 1
    assert len(write(tmp_path, [], 3)) == 0
