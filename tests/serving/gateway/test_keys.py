"""API key file at run time: changes apply to the next request, and without keys every request is rejected."""

import logging
import os
from pathlib import Path

import pytest

from strata.serving.api.requests import ApiError
from strata.serving.gateway.keys import Keys, read

OLD_NS = 10**18  # any fixed time


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    return path


def admits(keys: Keys, value: bytes | None) -> bool:
    headers = [(b"host", b"x")] if value is None else [(b"host", b"x"), (b"authorization", value)]
    try:
        keys.check(headers)
    except ApiError as error:
        assert error.status == 401 and error.body["error"]["type"] == "authentication_error"
        assert error.headers == {"www-authenticate": "Bearer"}
        return False
    return True


@pytest.mark.parametrize(
    ("value", "admitted"),
    [
        (b"Bearer first", True),
        (b"Bearer second", True),
        (b"bearer first", True),  # the scheme is case-insensitive (RFC 9110)
        (b"BEARER  first ", True),
        (b"Bearer First", False),
        (b"Bearer firs", False),
        (b"Bearer first second", False),
        (b"Bearer first\nsecond", False),
        (b"Bearer", False),
        (b"Bearer ", False),
        (b"Basic first", False),
        (b"first", False),
        (b"", False),
        (None, False),
    ],
)
def test_only_a_bearer_key_of_the_file_is_admitted(file: Path, value: bytes | None, admitted: bool) -> None:
    assert admits(Keys(file), value) is admitted


def test_comments_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"# of the team\nfirst\n  #second\nthird#\n")
    admitted = {value: admits(Keys(file), b"Bearer " + value) for value in (b"first", b"# of the team", b"#second", b"third#")}
    assert admitted == {b"first": True, b"# of the team": False, b"#second": False, b"third#": True}


def test_the_first_authorization_header_counts(file: Path) -> None:
    Keys(file).check([(b"authorization", b"Bearer first"), (b"authorization", b"Bearer wrong")])
    with pytest.raises(ApiError):
        Keys(file).check([(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer first")])


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        (b"", []),
        (b"\n \n\t\r\n", []),
        (b"a", [b"a"]),
        (b"\n  a \r\n\n\tb\n", [b"a", b"b"]),
        (b"a\na\n", [b"a", b"a"]),
        (b"two words\n", [b"two words"]),
        (b"\xff\n", [b"\xff"]),
    ],
)
def test_a_key_is_a_line_without_the_spaces_around_it(tmp_path: Path, content: bytes, keys: list[bytes]) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    assert read(file) == keys


def test_added_and_removed_keys_apply_to_the_next_request(file: Path) -> None:
    keys = Keys(file)
    assert admits(keys, b"Bearer first") and not admits(keys, b"Bearer third")
    file.write_text("second\nthird\n")
    assert admits(keys, b"Bearer third") and admits(keys, b"Bearer second")
    assert not admits(keys, b"Bearer first")


def test_an_unchanged_file_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, reads = Keys(file), []
    content = file.read_bytes()
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or content)
    for _ in range(3):
        assert admits(keys, b"Bearer first")
    assert reads == [file]


def replace_in_place(file: Path, time_ns: int) -> None:
    """Another key of the same length in the same inode."""
    file.write_text("other\nsecond\n")
    os.utime(file, ns=(time_ns, time_ns))


def grow(file: Path, time_ns: int) -> None:
    file.write_text("other\nsecond\nthird\n")
    os.utime(file, ns=(time_ns, time_ns))


def rename_onto(file: Path, time_ns: int) -> None:
    new = file.with_name("new")
    replace_in_place(new, time_ns)
    new.replace(file)


@pytest.mark.parametrize(
    ("change", "time_ns"), [(replace_in_place, OLD_NS - 1), (replace_in_place, OLD_NS + 1), (grow, OLD_NS), (rename_onto, OLD_NS)]
)
def test_each_way_to_change_the_file_is_noticed(file: Path, change: object, time_ns: int) -> None:
    os.utime(file, ns=(OLD_NS, OLD_NS))
    keys = Keys(file)
    assert admits(keys, b"Bearer first")
    change(file, time_ns)  # type: ignore[operator]
    assert admits(keys, b"Bearer other") and not admits(keys, b"Bearer first")


def test_a_file_of_the_epoch_is_read(file: Path) -> None:
    """Reproducible images set every modification time to zero."""
    os.utime(file, ns=(0, 0))
    assert admits(Keys(file), b"Bearer first")


def removed(file: Path) -> None:
    file.unlink()


def emptied(file: Path) -> None:
    file.write_text("")


def blanked(file: Path) -> None:
    file.write_text(" \n\n")


def made_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("outage", "reason"),
    [
        (removed, "cannot be read: No such file or directory"),
        (emptied, "has no key"),
        (blanked, "has no key"),
        (made_a_folder, "cannot be read: Is a directory"),
    ],
)
def test_without_keys_nobody_is_admitted_and_the_log_has_one_line(
    file: Path, caplog: pytest.LogCaptureFixture, outage: object, reason: str
) -> None:
    keys = Keys(file)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert admits(keys, b"Bearer first") and not caplog.records
        outage(file)  # type: ignore[operator]
        for _ in range(3):
            assert not any(admits(keys, value) for value in (b"Bearer first", b"Bearer second", b"Bearer ", b"Bearer", None))
    assert [record.getMessage() for record in caplog.records] == [
        f"The API key file {file} {reason}. Every request is rejected until it has a key."
    ]


def test_a_restored_file_admits_again_and_the_next_outage_is_logged(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(file)
    time_ns = file.stat().st_mtime_ns
    with caplog.at_level(logging.ERROR, "ray.serve"):
        for outage in (1, 2):
            aside = file.rename(file.with_name("aside"))
            assert not admits(keys, b"Bearer first")
            aside.rename(file)  # the same inode, size and time
            assert file.stat().st_mtime_ns == time_ns and admits(keys, b"Bearer first")
            assert len(caplog.records) == outage


def test_a_file_that_never_existed_admits_nobody(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "absent")
    assert not admits(keys, b"Bearer ") and not admits(keys, None) and not admits(keys, b"Bearer first")
