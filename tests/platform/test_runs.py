import errno
import fcntl
import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.ray_cluster import excluded_nodes
from strata.platform.ray_cluster.excluded_nodes import CORRUPTED, Excluded, Node
from strata.platform.runs import State


def test_run_stores_its_recipe_and_state() -> None:
    recipe = recipe_file.load("laptop", ["train.steps=7", "train.warmup=1"])
    run = runs.create("mine", recipe, "laptop")
    assert runs.find("mine").recipe() == recipe
    assert (run.state().status, run.state().steps, run.state().pid) == ("running", 7, os.getpid())


def test_unnamed_runs_are_numbered_and_named_ones_are_unique() -> None:
    recipe = recipe_file.load()
    assert [runs.create(None, recipe, "laptop").name for _ in range(3)] == ["laptop-1", "laptop-2", "laptop-3"]
    with pytest.raises(UserError, match=r"exists already[\s\S]*--resume laptop-2"):
        runs.create("laptop-2", recipe, "laptop")


@pytest.mark.parametrize("name", ["../up", "", "a/b", "-x", "x" * 64, "with space"])
def test_bad_names(name: str, own_home: Path) -> None:
    with pytest.raises(UserError, match="is not a valid run name"):
        runs.create(name, recipe_file.load(), "laptop")
    with pytest.raises(UserError, match="There is no run"):
        runs.find(name)
    assert not list(own_home.glob("runs/*"))


def test_unknown_run_suggests_the_nearest() -> None:
    runs.create("baseline", recipe_file.load(), "laptop")
    with pytest.raises(UserError, match="Did you mean 'baseline'"):
        runs.find("basline")


def test_no_exported_run() -> None:
    runs.create("unfinished", recipe_file.load(), "laptop")
    with pytest.raises(UserError, match=r"There is no exported run to serve[\s\S]*make train"):
        runs.newest_with_export()


def test_killed_driver_is_detected() -> None:
    run = runs.create("mine", recipe_file.load(), "laptop")
    assert run.state().observed_status() == "running"
    run.write_state(State("running", pid=2**22 - 1, pid_created=1.0))
    assert run.state().observed_status() == "killed"


def test_excluded_nodes_are_listed_with_the_file_that_readmits_them(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from strata.platform.commands import runs as list_runs

    run = runs.create("mine", recipe_file.load(), "laptop")
    node = Node("ab12" * 14, "node-3", "10.0.0.3")
    excluded_nodes.add(run.path, Excluded(node, CORRUPTED, "The parameters of rank 1 differ.", 0.0))
    list_runs()
    line = "mine: Node node-3 (10.0.0.3, Ray node ab12ab12) is excluded from this run: corrupted replica."
    shown = " ".join(capsys.readouterr().out.split())
    assert line in shown and str(excluded_nodes.path(run.path, node.id)) in shown
    excluded_nodes.path(run.path, node.id).write_text("{")
    list_runs()
    assert f"{node.id}.json is damaged" in capsys.readouterr().out


def test_damaged_runs_are_listed_and_do_not_affect_others(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from strata.monitoring.top.runs import RunWatch
    from strata.platform.commands import runs as list_runs

    good = runs.create("good", recipe_file.load(), "laptop")
    for name, file, text in (
        ("no-state", "state.json", None),
        ("bad-state", "state.json", "{"),
        ("no-recipe", "recipe.yaml", None),
        ("bad-recipe", "recipe.yaml", "- ["),
        ("bad-id", "run.json", "{}"),
    ):
        run = runs.create(name, recipe_file.load(), "laptop")
        (run.path / file).unlink() if text is None else (run.path / file).write_text(text)
    for run in runs.every():
        run.export.mkdir()
        (run.export / "config.json").touch()
    (own_home / "runs" / "a-file").touch()
    (own_home / "runs" / "empty").mkdir()
    list_runs()
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1] for line in shown.splitlines()[1:7]}
    assert rows == {"good": "running"} | dict.fromkeys(("no-state", "bad-state", "no-recipe", "bad-recipe", "bad-id"), "damaged")
    assert f"no-recipe: {own_home}/runs/no-recipe/recipe.yaml is missing." in shown
    assert {progress.name for progress in RunWatch().poll()} >= {"good"}
    os.utime(good.path / "recipe.yaml", (2**31, 2**31))
    os.utime(own_home / "runs" / "bad-recipe" / "recipe.yaml", (2**31 + 1, 2**31 + 1))
    assert runs.newest_with_export() == good


def test_empty_folder_is_reused_and_a_file_is_not(own_home: Path) -> None:
    (own_home / "runs" / "empty").mkdir(parents=True)
    (own_home / "runs" / "file").touch()
    assert runs.create("empty", recipe_file.load(), "laptop").id()
    with pytest.raises(UserError, match="file exists and is not a run"):
        runs.create("file", recipe_file.load(), "laptop")


def test_second_lock_of_a_run_fails(own_home: Path) -> None:
    run = runs.create("mine", recipe_file.load(), "laptop")
    with run.locked(), pytest.raises(UserError, match="is being trained by another process"), run.locked():
        pass
    with run.locked():
        pass


# Names, order, states and files

ME = (os.getpid(), psutil.Process().create_time())


LAPTOP = recipe_file.load("laptop")


def made(name: str | None = "mine") -> runs.Run:
    return runs.create(name, LAPTOP, "laptop")


@pytest.mark.parametrize("name", ["x" * 63, "a", "9.b_C-d"])
def test_good_names(name: str) -> None:
    assert made(name).name == name and runs.exists(name)


def test_a_folder_with_any_file_of_a_run_is_a_run(own_home: Path) -> None:
    for number, file in enumerate(("run.json", "recipe.yaml", "state.json", "metrics.jsonl", "checkpoints", "export")):
        (own_home / "runs" / f"r{number}").mkdir(parents=True)
        (own_home / "runs" / f"r{number}" / file).touch()
    (own_home / "runs" / "other").mkdir()
    (own_home / "runs" / "other" / "notes.txt").touch()
    (own_home / "runs" / ".hidden").mkdir()
    (own_home / "runs" / ".hidden" / "run.json").touch()
    assert sorted(run.name for run in runs.every()) == ["r0", "r1", "r2", "r3", "r4", "r5"]
    assert not runs.exists("other") and not runs.exists("missing") and not runs.exists(".hidden")


def test_runs_are_listed_oldest_first() -> None:
    assert runs.every() == []
    for name, modified in (("b", 3.0), ("c", 1.0), ("a", 3.0)):
        run = made(name)
        os.utime(run.path / "recipe.yaml", (modified, modified))
    assert [run.name for run in runs.every()] == ["c", "a", "b"], "by time, then by name"
    (runs.find("c").path / "recipe.yaml").unlink()
    os.utime(runs.find("c").path, (2.0, 2.0))
    assert [run.name for run in runs.every()] == ["c", "a", "b"], "a damaged run by its folder's time"
    os.utime(runs.find("c").path, (4.0, 4.0))
    assert [run.name for run in runs.every()] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State("running", pid=ME[0], pid_created=ME[1]), "running"),
        (State("running", pid=ME[0], pid_created=ME[1], host=socket.gethostname()), "running"),
        (State("running", pid=ME[0], pid_created=ME[1], host="other-pod"), "running on other-pod"),
        (State("running", pid=ME[0], pid_created=1.0), "killed"),
        (State("finished", pid=1, host="other-pod"), "finished"),
        (State("failed", pid=ME[0], pid_created=1.0), "failed"),
    ],
)
def test_observed_status(state: State, expected: str) -> None:
    assert state.observed_status() == expected
    assert state.elsewhere() is (expected == "running on other-pod")


@pytest.mark.parametrize(
    ("field", "accepted", "rejected"),
    [
        ("step", [0, 2**63 - 1], [-1, 2**63]),
        ("steps", [0, 2**63 - 1], [-1, 2**63]),
        ("saved", [0, 2**63 - 1], [-1, 2**63]),
        ("pid", [0, 2**31 - 1], [-1, 2**31]),
    ],
)
def test_bounds_of_a_state(field: str, accepted: list[int], rejected: list[int]) -> None:
    run = made()
    for value in accepted:
        (run.path / "state.json").write_text(json.dumps({"status": "running", field: value}))
        assert getattr(run.state(), field) == value
    for value in rejected:
        (run.path / "state.json").write_text(json.dumps({"status": "running", field: value}))
        with pytest.raises(runs.DamagedRun, match=f"is damaged: {field}: "):
            run.state()


def test_a_state_has_defaults_for_files_of_older_versions() -> None:
    run = made()
    (run.path / "state.json").write_text('{"status": "finished"}')
    assert run.state() == State("finished", 0, 0, None, None, 0, 0.0, "", 0)
    (run.path / "state.json").write_text("{")
    with pytest.raises(runs.DamagedRun, match="is damaged: Invalid JSON"):
        run.state()


def test_writing_a_running_state_names_this_process() -> None:
    run = made()
    run.write_running(State("failed", step=3, steps=9, saved=2))
    state = run.state()
    assert (state.status, state.step, state.steps, state.saved) == ("running", 3, 9, 2)
    assert (state.pid, state.pid_created, state.host) == (*ME, socket.gethostname())


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"id": "abc1"}', "abc1"), ('{"id": 1}', None), ('{"id": ""}', None), ('{"id": "a b"}', None), ("[]", None), ("{", None)],
)
def test_ids(text: str, expected: str | None) -> None:
    run = made()
    (run.path / "run.json").write_text(text)
    if expected:
        assert run.id() == expected
    else:
        with pytest.raises(runs.DamagedRun, match="it has no id"):
            run.id()


def test_a_run_without_an_id_gets_one() -> None:
    run = made()
    assert len(run.id() or "") == 32
    (run.path / "run.json").unlink()
    assert run.id() is None and run.damage() is None
    run.set_id("abc")
    assert run.id() == "abc"


def test_paths_of_a_run(own_home: Path) -> None:
    run = made()
    assert run.path == own_home / "runs" / "mine"
    names = [run.metrics.name, run.plot.name, run.checkpoints.name, run.export.name]
    assert names == ["metrics.jsonl", "loss.png", "checkpoints", "export"]
    assert run.has_state() and not run.has_export()
    (run.path / "state.json").unlink()
    assert not run.has_state()
    run.remove()
    assert not run.path.exists()


def test_the_newest_run_with_an_export_is_served() -> None:
    for modified, name in enumerate(("a", "b", "c"), 1):
        run = made(name)
        os.utime(run.path / "recipe.yaml", (modified, modified))
        if name != "c":
            run.export.mkdir()
            (run.export / "config.json").touch()
    assert runs.newest_with_export().name == "b"
    (runs.find("b").path / "recipe.yaml").write_text("- [")
    assert runs.newest_with_export().name == "a"


def test_a_failed_creation_leaves_no_folder(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(runs, "write_atomic", full)
    with pytest.raises(OSError, match="full"):
        made()
    assert list((own_home / "runs").iterdir()) == []


def test_a_folder_with_other_files_is_not_reused(own_home: Path) -> None:
    (own_home / "runs" / "mine").mkdir(parents=True)
    (own_home / "runs" / "mine" / "notes.txt").touch()
    with pytest.raises(UserError, match="mine exists and is not a run"):
        made()
    (own_home / "runs" / "laptop-1").mkdir()
    (own_home / "runs" / "laptop-2").mkdir()
    (own_home / "runs" / "laptop-1" / "notes.txt").touch()
    assert made(None).name == "laptop-2", "an empty folder is reused"


@pytest.mark.parametrize(("number", "raises"), [(errno.ENOLCK, False), (errno.EOPNOTSUPP, False), (errno.EIO, True)])
def test_file_systems_without_locks(monkeypatch: pytest.MonkeyPatch, number: int, raises: bool) -> None:
    run = made()

    def no_locks(*_: int) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    if raises:
        with pytest.raises(OSError, match="no locks"), run.locked():
            pass
    else:
        with run.locked():
            pass
