"""Tiers without memory or without a folder are refused before an engine starts."""

from pathlib import Path

import pytest

from strata.platform.errors import UserError
from strata.serving.kv_offload import place_check
from strata.serving.kv_offload.settings import GIB, KvOffload


def test_usable_places(tmp_path: Path) -> None:
    place_check.check(KvOffload(1 << 20, None, 0))
    place_check.check(KvOffload(1 << 20, str(tmp_path / "new" / "kv"), GIB))
    assert list((tmp_path / "new" / "kv").iterdir()) == []


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cpu_gib=1e.* left in"):
        place_check.check(KvOffload(10**9 * GIB, None, 0), tmp_path)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/kv")):
        with pytest.raises(UserError, match=f"serve.kv_offload.disk={folder} cannot be written: "):
            place_check.check(KvOffload(1 << 20, str(folder), GIB))
