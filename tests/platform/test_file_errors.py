"""Errors of files and disks at the command line: a line with the path and a line with the fix."""

import errno
import os

import pytest

from strata.platform import cli, file_errors


@pytest.mark.parametrize("number", sorted(file_errors.FIXES))
def test_file_errors_name_the_path_and_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "/some/[place]")

    monkeypatch.setattr(cli, "build", lambda _: fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    cause, fix = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert cause == f"error: /some/[place]: {os.strerror(number)}." and fix.startswith("  fix: ")
    assert fix.endswith(", then run the command again.")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    monkeypatch.setattr(cli, "build", lambda _: fail)
    with pytest.raises(ConnectionRefusedError):
        cli.main()


@pytest.mark.parametrize(
    "text",
    [
        "[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device",
        "Error while serializing: I/O error: No space left on device (os error 28)",
    ],
)
def test_errno_is_parsed_from_messages_of_arrow_and_rust(text: str) -> None:
    assert file_errors.number_of(RuntimeError(text)) == errno.ENOSPC
    assert file_errors.number_of(RuntimeError("something else")) is None
