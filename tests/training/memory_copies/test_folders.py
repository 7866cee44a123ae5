"""Owners of folders: a living run's folder stays, a dead run's is removed at the next start, whatever ended it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.training.memory_copies import folders


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(folders.ROOT, str(tmp_path / "memory"))
    return tmp_path / "memory"


def owner(run: str) -> subprocess.Popen[str]:
    """Process that owns the folder of a run until it is killed."""
    script = f"""
import sys; sys.path[:0] = {sys.path!r}
from strata.training.memory_copies import folders
with folders.owned({run!r}):
    (folders.folder({run!r}) / "rank-00000-a").touch()
    print("owned", flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "owned\n"
    return process


def names(base: Path) -> set[str]:
    return {path.name for path in base.iterdir()} - {folders.GUARD}


def test_folder_is_removed_at_the_end_of_the_run(base: Path) -> None:
    assert folders.folder("a") is None
    with pytest.raises(KeyboardInterrupt), folders.owned("a"):
        found = folders.folder("a")
        assert found == base / "a"
        (found / "rank-00000-a").touch()
        raise KeyboardInterrupt
    assert names(base) == set() and folders.folder("a") is None


def test_dead_runs_are_removed_and_living_ones_are_not(base: Path) -> None:
    living, killed = owner("living"), owner("killed")
    try:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert names(base) == {"living", "killed"}
        with folders.owned("new"):
            assert names(base) == {"living", "new"}
            assert (base / "living" / "rank-00000-a").exists()
    finally:
        living.communicate("")
    assert names(base) == set()


def test_killed_driver_leaves_its_copies_to_the_next_driver_of_the_run(base: Path) -> None:
    killed = owner("a")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    with folders.owned("a"):
        assert (base / "a" / "rank-00000-a").exists()
    assert names(base) == set()


def test_second_owner_leaves_the_folder_to_the_first(base: Path) -> None:
    with folders.owned("a"):
        second = owner("a")
        second.communicate("")
        assert names(base) == {"a"}
    assert names(base) == set()


def test_two_starts_at_once_do_not_remove_each_other(base: Path) -> None:
    """Eight processes start and end runs without pause; none may find its own folder gone."""
    script = f"""
import sys; sys.path[:0] = {sys.path!r}
from strata.training.memory_copies import folders
for number in range(40):
    with folders.owned(f"{{sys.argv[1]}}{{number}}"):
        assert folders.folder(f"{{sys.argv[1]}}{{number}}") is not None
"""
    processes = [subprocess.Popen([sys.executable, "-c", script, letter]) for letter in "abcdefgh"]
    assert [process.wait(120) for process in processes] == [0] * 8
    assert names(base) == set()


def test_run_without_copies_owns_nothing(base: Path) -> None:
    with folders.owned(""):
        assert not base.exists() and folders.folder("") is None


def test_folders_are_private(base: Path) -> None:
    with folders.owned("a"):
        assert (base.stat().st_mode & 0o777, (base / "a").stat().st_mode & 0o777) == (0o700, 0o700)


def test_copies_are_discarded_and_their_folder_stays(base: Path) -> None:
    with folders.owned("a"):
        for name in ("rank-00000-a", "incoming-rank-00001-b", "records.jsonl"):
            (base / "a" / name).touch()
        folders.discard("a")
        assert {path.name for path in (base / "a").iterdir()} == {"records.jsonl"}
    folders.discard("a")  # no folder is no error
