import hashlib
from pathlib import Path

import pytest

from strata.platform.errors import UserError
from strata.training.data import digests
from strata.training.data.digests import Files, Stamp, writable

SECOND = 10**9
NOW = 1000 * SECOND


def write(folder: Path, **contents: str) -> list[Path]:
    for name, content in contents.items():
        (folder / name).write_text(content)
    return [folder / name for name in contents]


def test_digest_covers_salt_names_and_contents_in_order(tmp_path: Path) -> None:
    expected = hashlib.blake2b(b"salt", digest_size=16)
    for name, content in (("a", b"one"), ("b", b"two")):
        expected.update(name.encode())
        expected.update(hashlib.blake2b(content).digest())
    paths = write(tmp_path, a="one", b="two")
    assert Files(paths).digest("salt") == expected.hexdigest()
    others = [Files(paths).digest(), Files(paths[::-1]).digest("salt"), Files(paths[:1]).digest("salt")]
    write(tmp_path, a="two", b="one")
    others.append(Files(paths).digest("salt"))
    assert len({expected.hexdigest(), *others}) == 5


@pytest.mark.parametrize(
    ("written", "changed", "cached"),
    [
        (3.001, 3.001, True),
        (3.0, 3.001, False),  # at the limit
        (3.001, 3.0, False),
        (0.1, 500.0, False),
        (500.0, 0.1, False),
        (4.0, 500.0, True),
        (500.0, 500.0, True),
    ],
)
def test_digest_is_cached_once_a_file_is_unchanged_for_three_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: float, changed: float, cached: bool
) -> None:
    """`written` and `changed` are the ages of the modification and of the inode change. A second, older file has no effect."""
    new, old = (Stamp(3, NOW - int(a * SECOND), NOW - int(b * SECOND)) for a, b in ((written, changed), (900, 900)))
    monkeypatch.setattr(digests, "_stamp", lambda path: new if path.name == "a" else old)
    monkeypatch.setattr(digests.time, "time_ns", lambda: NOW)
    read: list[str] = []
    content = digests._content
    monkeypatch.setattr(digests, "_content", lambda path: read.append(path.name) or content(path))
    paths = write(tmp_path, a="one", b="two")
    first = Files(paths).digest()
    assert Files(paths).digest() == first
    assert sorted(read) == (["a", "b"] if cached else ["a", "a", "b", "b"])


@pytest.mark.parametrize("change", [{"size": 4}, {"mtime_ns": 11}, {"ctime_ns": 21}])
def test_cached_digest_is_of_the_same_path_size_and_timestamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int]
) -> None:
    stamp = {"size": 3, "mtime_ns": 10, "ctime_ns": 20}
    monkeypatch.setattr(digests, "_stamp", lambda _: Stamp(**stamp))
    paths = write(tmp_path, a="one", b="one")
    Files(paths[:1]).remember("known", "salt")
    assert Files(paths[:1]).digest("salt") == "known"
    assert "known" not in {Files(paths[:1]).digest(), Files(paths[1:]).digest("salt"), Files(paths).digest("salt")}
    stamp |= change
    assert Files(paths[:1]).digest("salt") != "known"


def test_no_files_have_a_digest(tmp_path: Path) -> None:
    assert Files([]).digest() == hashlib.blake2b(digest_size=16).hexdigest()


def test_errors_name_the_path_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing cannot be read: No such file or directory") as raised:
        Files([tmp_path / "missing"])
    assert raised.value.fix == "Restore the file, or remove it from data.path."
    with pytest.raises(UserError, match="cache cannot be written: a reason"), writable(tmp_path / "cache"):
        raise OSError("a reason")


def test_change_during_the_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = write(tmp_path, a="one")
    content = digests._content

    def changing(path: Path) -> bytes:
        path.write_text("longer")
        return content(path)

    monkeypatch.setattr(digests, "_content", changing)
    with pytest.raises(UserError, match="a changed while it was being read"):
        Files([path]).digest()
