"""File and disk faults: each ends in a clear error that changes nothing, or in a run with correct steps.

A run is trained once and stopped at step 6 of 8, with checkpoints of steps 4 and 6. Each test copies it, injects a fault, and
resumes the copy. A refused run must be unchanged and must resume after the repair. In both cases its eight losses must equal
those of an undisturbed run.
"""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from strata.platform.runs import Run
from strata.training.checkpoint import export, format
from strata.training.metrics import records

from .conftest import SMALL
from .faults import StandIn, contents, losses, strata, without_ray

Spoil = Callable[[Run], object]


@dataclass(frozen=True)
class Trained:
    home: Path
    expected: list[tuple[int, float]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Trained]:
    home = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        patch.setenv("STRATA_HOME", str(home))
        settings = [*SMALL, f"data.path={corpus}"]
        assert strata("train", "--run", "whole", *settings) == 0
        StandIn.hooks = {6: (home / "runs" / "r" / "stop").touch}
        assert strata("train", "--run", "r", *settings) == 130
        (home / "runs" / "r" / "stop").unlink()
    expected = losses(Run(home / "runs" / "whole"))
    shutil.rmtree(home / "runs" / "whole")
    assert [step for step, _ in expected] == list(range(1, 9))
    yield Trained(home, expected)


@pytest.fixture
def run(trained: Trained, home: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    without_ray(monkeypatch)
    shutil.copytree(trained.home, home, dirs_exist_ok=True)
    return Run(home / "runs" / "r")


def newest(run: Run) -> Path:
    return run.checkpoints / "step-00000006"


def only_one(run: Run) -> Path:
    shutil.rmtree(run.checkpoints / "step-00000004")
    return newest(run)


def truncate(path: Path, to: int = 10) -> None:
    path.write_bytes(path.read_bytes()[:to])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def write(path: Path, text: str) -> None:
    path.write_text(text)


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def of_another_run(path: Path) -> None:
    for manifest in path.glob("step-*/manifest-*.json"):
        raw = json.loads(manifest.read_text())
        raw["origin"]["run"] = "another"
        manifest.write_text(json.dumps(raw))


def spoil_all(run: Run) -> None:
    for part in run.checkpoints.glob("step-*/part-*.bin"):
        truncate(part)


REFUSED: dict[str, tuple[Spoil, str]] = {
    "manifest of the only checkpoint is gone": (
        lambda run: (only_one(run) / "manifest-00000.json").unlink(),
        "has reached step 6 by its records",
    ),
    "all manifests are gone": (
        lambda run: [path.unlink() for path in run.checkpoints.glob("step-*/manifest-*.json")],
        "step-00000004, step-00000006 cannot be loaded",
    ),
    "checkpoints folder is gone": (lambda run: shutil.rmtree(run.checkpoints), "there is no checkpoint in"),
    "checkpoints folder is empty": (
        lambda run: [path.unlink() if path.is_file() else shutil.rmtree(path) for path in run.checkpoints.iterdir()],
        "there is no checkpoint in",
    ),
    "checkpoints are gone and the claim is left": (
        lambda run: [shutil.rmtree(path) for path in run.checkpoints.glob("step-*")],
        "there is no checkpoint in",
    ),
    "checkpoints is a file": (lambda run: replace_by_file(run.checkpoints), "Not a directory"),
    "every part is truncated": (spoil_all, "All checkpoints in"),
    "checkpoints are another run's": (lambda run: of_another_run(run.checkpoints), "holds the checkpoints of another run"),
    "another run has claimed the folder": (
        lambda run: write(run.checkpoints / "run-abc.json", '{"id": "abc", "folder": "/elsewhere/runs/r"}'),
        "holds the checkpoints of another run (/elsewhere/runs/r)",
    ),
    "state.json is empty": (lambda run: write(run.path / "state.json", ""), "state.json is damaged"),
    "state.json is truncated": (lambda run: truncate(run.path / "state.json"), "state.json is damaged"),
    "state.json is a list": (lambda run: write(run.path / "state.json", "[1]"), "state.json is damaged"),
    "state.json has other keys": (lambda run: write(run.path / "state.json", '{"a": 1}'), "state.json is damaged"),
    "state.json has text for a number": (
        lambda run: write(run.path / "state.json", '{"status": "failed", "step": "x"}'),
        "state.json is damaged: step",
    ),
    "state.json has an impossible process": (
        lambda run: write(run.path / "state.json", '{"status": "running", "pid": -1}'),
        "state.json is damaged: pid",
    ),
    "state.json is no text": (lambda run: (run.path / "state.json").write_bytes(b"\xff\xfe\x00"), "state.json is damaged"),
    "state.json is a folder": (lambda run: replace_by_folder(run.path / "state.json"), "Is a directory"),
    "recipe.yaml is gone": (lambda run: (run.path / "recipe.yaml").unlink(), "recipe.yaml is missing"),
    "recipe.yaml is empty": (lambda run: write(run.path / "recipe.yaml", ""), "lacks 'model'"),
    "recipe.yaml is no YAML": (lambda run: write(run.path / "recipe.yaml", "train: [1"), "is not valid YAML"),
    "recipe.yaml is a list": (lambda run: write(run.path / "recipe.yaml", "- 1"), "holds a list"),
    "recipe.yaml has an unknown key": (
        lambda run: (run.path / "recipe.yaml").open("a").write("unknown: 1\n"),
        "Unknown recipe key 'unknown'",
    ),
    "recipe.yaml is a folder": (lambda run: replace_by_folder(run.path / "recipe.yaml"), "recipe.yaml is missing"),
    "run.json is empty": (lambda run: write(run.path / "run.json", ""), "run.json is damaged"),
    "metrics.jsonl is a folder": (lambda run: replace_by_folder(run.metrics), "Is a directory"),
}


@pytest.mark.parametrize(("spoil", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_fault_is_refused_without_changes_and_repair_resumes(
    run: Run, trained: Trained, home: Path, capsys: pytest.CaptureFixture[str], spoil: Spoil, message: str
) -> None:
    spoil(run)
    before = contents(run.path)
    assert strata("train", "--resume", "r") == 1
    check_error(capsys, message)
    assert contents(run.path) == before
    assert strata("runs") == 0  # lists the run in any condition
    assert " r " in capsys.readouterr().out
    shutil.rmtree(run.path)
    shutil.copytree(trained.home / "runs" / "r", run.path)
    assert strata("train", "--resume", "r") == 0
    assert losses(run) == trained.expected


def half_a_checkpoint(run: Run) -> None:
    """Partial checkpoint of a save that was killed."""
    folder = run.checkpoints / "step-00000007"
    folder.mkdir()
    (folder / format.UNFINISHED).touch()
    (folder / "part-00000.bin").write_bytes(b"half")


def leftovers(run: Run) -> None:
    (run.path / ".state.json.abc").write_text("{")
    (run.path / f".export-{os.uname().nodename}-{2**22 - 1}-abc").mkdir()


TOLERATED: dict[str, Spoil] = {
    "newest part is truncated": lambda run: truncate(newest(run) / "part-00000.bin"),
    "newest part has one bit flipped": lambda run: flip(newest(run) / "part-00000.bin"),
    "newest part is gone": lambda run: (newest(run) / "part-00000.bin").unlink(),
    "newest part is a folder": lambda run: replace_by_folder(newest(run) / "part-00000.bin"),
    "newest manifest is gone": lambda run: (newest(run) / "manifest-00000.json").unlink(),
    "newest manifest is truncated": lambda run: truncate(newest(run) / "manifest-00000.json"),
    "newest manifest is empty": lambda run: write(newest(run) / "manifest-00000.json", ""),
    "newest manifest is a list": lambda run: write(newest(run) / "manifest-00000.json", "[]"),
    "newest checkpoint is an empty folder": lambda run: (shutil.rmtree(newest(run)), newest(run).mkdir()),
    "newest checkpoint is a file": lambda run: replace_by_file(newest(run)),
    "oldest checkpoint is gone": lambda run: shutil.rmtree(run.checkpoints / "step-00000004"),
    "a save was killed": half_a_checkpoint,
    "a folder has the name of no step": lambda run: (run.checkpoints / "step-latest").mkdir(),
    "metrics.jsonl ends in half a line": lambda run: run.metrics.open("a").write('{"step": 7, "lo'),
    "metrics.jsonl has a line of garbage": lambda run: run.metrics.open("a").write("\x00\x00garbage\n"),
    "metrics.jsonl has steps beyond the checkpoint": lambda run: records.append(
        run.metrics, records.read(run.metrics)[-1] | {"step": 7}
    ),  # type: ignore[arg-type,operator]
    "state.json is gone": lambda run: (run.path / "state.json").unlink(),
    "run.json is gone": lambda run: (run.path / "run.json").unlink(),
    "claim is gone": lambda run: next(run.checkpoints.glob("run-*.json")).unlink(),
    "Ray's list of checkpoints is garbage": lambda run: write(run.checkpoints / format.RAY_SNAPSHOT, "{"),
    "temporary files were left": leftovers,
    "tokenizer is gone": lambda run: shutil.rmtree(run.path / "tokenizer"),
    "folder was renamed": lambda run: None,
    "token cache is gone": lambda run: shutil.rmtree(run.path.parent.parent / ".strata"),
}


@pytest.mark.parametrize("spoil", TOLERATED.values(), ids=TOLERATED.keys())
def test_fault_is_tolerated_with_the_same_losses(
    run: Run, trained: Trained, capsys: pytest.CaptureFixture[str], spoil: Spoil, request: pytest.FixtureRequest
) -> None:
    names = ("step-00000004", newest(run).name)
    spoil(run)
    if "folder was renamed" in request.node.name:
        run = Run(run.path.rename(run.path.with_name("other")))
    damaged = {name: contents(run.checkpoints / name) for name in names if (run.checkpoints / name).is_dir()}
    assert strata("train", "--resume", run.name) == 0
    assert losses(run) == trained.expected and run.state().status == "finished" and run.has_export()
    assert not list(run.path.glob(".*")), "leftovers"
    now = {path.name: contents(path) for path in run.checkpoints.glob("step-*") if path.is_dir()}
    for name, before in damaged.items():  # nothing was deleted, only renamed
        assert not before or before in (now.get(name), now.get(name + format.ASIDE)), f"{name} was lost"
    shown = capsys.readouterr().out
    assert "step 4/8" not in shown, "a step from before the resume was shown as if it were live"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a disk of a few megabytes, which requires root."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> None:
    """Fills a disk to the last byte, so that further writes fail."""
    with (disk / "ballast").open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(b"x" * size) == size:
                    continue
            except OSError as error:
                assert error.errno == errno.ENOSPC


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)


def end_driver(run: Run) -> None:
    """Marks the driver as dead. The command has ended, but its process, which is this one, still lives and is named in the state
    if that could not be written."""
    if run.state().status == "running":
        assert run.state().pid == os.getpid()
        run.write_state(replace(run.state(), pid_created=0.0))
        assert run.state().observed_status() == "killed"


@dataclass(frozen=True)
class Broken:
    """Disk fault and its repair."""

    spoil: Callable[[Path], object]
    repair: Callable[[Path], object]
    message: str


BROKEN = {
    "full": Broken(fill, lambda disk: (disk / "ballast").unlink(), "No space left on device"),
    "read-only": Broken(lambda disk: remount(disk, "ro"), lambda disk: remount(disk, "rw"), "Read-only file system"),
}


def moved_to(disk: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Moves the whole STRATA_HOME to the disk."""
    shutil.copytree(run.path.parent.parent, disk, dirs_exist_ok=True, ignore=shutil.ignore_patterns("disk"))
    monkeypatch.setenv("STRATA_HOME", str(disk))
    return Run(disk / "runs" / run.name)


def check_error(capsys: pytest.CaptureFixture[str], message: str) -> None:
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 2 and "\n  fix: " in error


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_disk_fault_before_a_resume(
    run: Run, trained: Trained, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: Broken
) -> None:
    run = moved_to(disk, run, monkeypatch)
    before = contents(run.path)
    broken.spoil(disk)
    assert strata("train", "--resume", "r") == 1
    check_error(capsys, broken.message)
    assert contents(run.path) == before
    assert strata("train", "--run", "new", *SMALL) == 1
    check_error(capsys, broken.message)
    assert not (disk / "runs" / "new").exists()
    broken.repair(disk)
    assert strata("train", "--resume", "r") == 0
    assert losses(run) == trained.expected


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("step", [7, 8])
def test_disk_fault_during_a_run(
    run: Run,
    trained: Trained,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: Broken,
    step: int,
) -> None:
    """History, checkpoints and the run's final state are all on the disk."""
    run = moved_to(disk, run, monkeypatch)
    StandIn.hooks = {step: lambda: broken.spoil(disk)}
    assert strata("train", "--resume", "r") == 1
    check_error(capsys, broken.message)
    broken.repair(disk)
    StandIn.hooks = {}
    end_driver(run)
    assert strata("train", "--resume", "r") == 0
    assert losses(run) == trained.expected


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_checkpoint_disk_fault_during_a_run(
    run: Run, trained: Trained, disk: Path, corpus: Path, capsys: pytest.CaptureFixture[str], broken: Broken
) -> None:
    settings = [*SMALL, f"data.path={corpus}", f"train.checkpoints={disk}"]
    StandIn.hooks = {6: lambda: broken.spoil(disk)}
    assert strata("train", "--run", "new", *settings) == 1
    check_error(capsys, broken.message)
    new = Run(run.path.with_name("new"))
    assert new.state().status == "failed" and (disk / "new" / "step-00000004").is_dir()
    broken.repair(disk)
    StandIn.hooks = {}
    assert strata("train", "--resume", "new") == 0
    assert losses(new) == trained.expected


def test_full_disk_during_the_export(
    run: Run, trained: Trained, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = moved_to(disk, run, monkeypatch)
    write_folder = export.write_folder

    def fill_first(*arguments: Any) -> None:
        fill(disk)
        write_folder(*arguments)

    monkeypatch.setattr(export, "write_folder", fill_first)
    assert strata("train", "--resume", "r") == 1
    check_error(capsys, "No space left on device")
    assert not run.has_export() and not list(run.path.glob(".export*"))
    (disk / "ballast").unlink()
    monkeypatch.setattr(export, "write_folder", write_folder)
    end_driver(run)
    assert strata("train", "--resume", "r") == 0
    assert losses(run) == trained.expected and run.has_export()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_unreadable_checkpoint(
    run: Run, trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """A missing permission is an error for the user to fix. A bad sector is damage, and the previous checkpoint is used."""
    verify, before = format._verify_file, contents(run.checkpoints)

    def fail(folder: Any, manifest: Any) -> None:
        if "step-00000006" in folder.path:
            folder.filesystem = Unreadable(number)
        verify(folder, manifest)

    class Unreadable:
        def __init__(self, number: int) -> None:
            self._number = number

        def open_input_stream(self, path: str) -> None:
            raise OSError(self._number, os.strerror(self._number), path)

    monkeypatch.setattr(format.Folder, "__setattr__", object.__setattr__)
    monkeypatch.setattr(format, "_verify_file", fail)
    if number == errno.EACCES:
        assert strata("train", "--resume", "r") == 1
        check_error(capsys, "Permission denied")
        assert contents(run.checkpoints) == before
    monkeypatch.setattr(format, "_verify_file", verify if number == errno.EACCES else fail)
    assert strata("train", "--resume", "r") == 0
    assert losses(run) == trained.expected


EXPORT_REFUSED: dict[str, tuple[Spoil, str]] = {
    "no checkpoint": (lambda run: [shutil.rmtree(path) for path in run.checkpoints.glob("step-*")], "has no checkpoint"),
    "all damaged": (spoil_all, "All checkpoints in"),
    "another run's": (lambda run: of_another_run(run.checkpoints), "holds the checkpoints of another run"),
    "recipe is gone": (lambda run: (run.path / "recipe.yaml").unlink(), "recipe.yaml is missing"),
    "tokenizer is gone": (lambda run: shutil.rmtree(run.path / "tokenizer"), "tokenizer.json"),
    "tokenizer is garbage": (lambda run: write(run.path / "tokenizer" / "tokenizer.json", "{"), "tokenizer.json"),
    "checkpoints is a file": (lambda run: replace_by_file(run.checkpoints), "Not a directory"),
}


@pytest.mark.parametrize(("spoil", "message"), EXPORT_REFUSED.values(), ids=EXPORT_REFUSED.keys())
def test_export_is_refused_without_changes(run: Run, capsys: pytest.CaptureFixture[str], spoil: Spoil, message: str) -> None:
    spoil(run)
    before = contents(run.path)
    assert strata("export", "r") == 1
    check_error(capsys, message)
    assert contents(run.path) == before and not run.has_export()


def test_export_killed_between_its_renames_is_completed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert strata("export", "r") == 0
    whole = contents(run.export)
    building = run.path / f".export-{os.uname().nodename}-{2**22 - 1}-abc"
    run.export.rename(building)
    (building / export.REPLACED).mkdir()
    half = run.path / f".export-{os.uname().nodename}-{2**22 - 2}-abc"
    half.mkdir()
    export.finish_or_remove_leftovers(run.export)
    assert contents(run.export) == whole and not list(run.path.glob(".export*"))
