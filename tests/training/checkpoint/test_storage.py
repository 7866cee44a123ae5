import os
from pathlib import Path
from typing import Any

import pytest

from strata.platform.errors import UserError
from strata.training.checkpoint.storage import Folder, folder


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])  # a path, pyarrow's scheme, fsspec's scheme
def test_folder_behind_a_path_or_uri(tmp_path: Path, scheme: str) -> None:
    place = folder(f"{scheme}{tmp_path}/here")
    assert place.names() == [] and place.size("a") is None
    (place / "inner").write("a", b"one")
    assert place.names() == ["inner"] and (place / "inner").size("a") == 3
    assert (place / "inner").read("a") == b"one" == (tmp_path / "here" / "inner" / "a").read_bytes()
    with (place / "inner").open("a") as file:
        assert file.read_at(2, 1) == b"ne"
    (place / "inner").remove()
    assert place.names() == []


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.checkpoints=nope://x cannot be opened"):
        folder("nope://x")


@pytest.mark.parametrize("scheme", ["", "file://", "local://"])
def test_trailing_slash_is_ignored(tmp_path: Path, scheme: str) -> None:
    assert folder(f"{scheme}{tmp_path}/here/").path == f"{tmp_path}/here"


def test_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder("here").path == f"{tmp_path}/here"


def test_sizes_and_times_of_files(tmp_path: Path) -> None:
    place = folder(tmp_path)
    place.write("b", b"one"), place.write("a", b"")
    (tmp_path / "inner").mkdir()
    assert place.names() == ["a", "b", "inner"]  # sorted, without the temporary files
    assert (place.size("a"), place.size("b"), place.size("inner"), place.size("none")) == (0, 3, None, None)
    os.utime(tmp_path / "b", (1234.5, 1234.5))
    assert place.written_at("b") == 1234.5


class Info:
    mtime_ns = None


def test_storage_without_modification_times() -> None:
    class Filesystem:
        def get_file_info(self, path: str) -> Info:
            return Info()

    assert Folder(Filesystem(), "bucket").written_at("a") is None


def test_deletion_of_what_does_not_exist_does_nothing(tmp_path: Path) -> None:
    place = folder(tmp_path)
    place.write("a", b"one"), place.write("b", b"two")
    place.delete("a"), place.delete("a")
    (place / "none").remove(), (place / "b").remove()  # not a folder
    assert place.names() == ["b"]


class WithoutFolderMoves:
    """Object storage: it moves files, but not folders."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def move(self, before: str, after: str) -> None:
        if Path(before).is_dir():
            raise NotImplementedError
        self._inner.move(before, after)


@pytest.mark.parametrize("moves", [True, False])
def test_folders_are_renamed_with_all_files(tmp_path: Path, moves: bool) -> None:
    place = folder(tmp_path)
    if not moves:
        place = Folder(WithoutFolderMoves(place.filesystem), place.path)
    for name in ("a", "b"):
        (place / "before").write(name, name.encode())
    place.rename("before", "after")
    assert place.names() == ["after"] and (place / "after").names() == ["a", "b"]
    assert (place / "after").read("b") == b"b"
