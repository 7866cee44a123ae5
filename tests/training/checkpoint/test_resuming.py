"""Messages of a resumed run: a changed schedule, stalls, and translated Ray errors."""

import errno
import os
from pathlib import Path

import pytest

from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.ray_cluster.watch import ClusterDied, changes
from strata.platform.recipe import Recipe
from strata.training import commands, driver, failures, workers
from strata.training.checkpoint import resuming
from strata.training.checkpoint.format import Origin
from strata.training.checkpoint.saver import Saver
from strata.training.checkpoint.storage import folder
from strata.training.workers import StallDetector

from ..faults import without_ray


def changed(recipe: Recipe, **values: object) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=values)})


@pytest.mark.parametrize(
    ("values", "step", "line"),
    [
        ({"lr": 0.02}, 4, "Changed train.lr from 0.01 to 0.02: the learning rate of step 5 jumps from 0.00"),
        ({"steps": 100}, 4, "Changed train.steps from 8 to 100: the learning rate of step 5 jumps from 0.00"),
        ({"steps": 100}, 0, None),  # nothing was trained yet
        ({"keep": 7}, 4, None),
        ({"lr": 0.02}, 8, None),  # no step is left
    ],
)
def test_learning_rate_jump_is_reported(
    home: Path, small_recipe: Recipe, values: dict[str, object], step: int, line: str | None
) -> None:
    before = changed(small_recipe, lr=0.01, schedule="cosine")
    run = runs.create("r", before, "test")
    lines = resuming.schedule_changes(run, changed(before, **values), step)
    assert [text.startswith(line or "") for text in lines] == ([True] if line else [])


@pytest.mark.parametrize("begins", [True, False])
def test_objective_of_a_run_does_not_change(home: Path, small_recipe: Recipe, begins: bool) -> None:
    distilled = changed(small_recipe, distill="/teacher")
    before, after = (distilled, small_recipe) if begins else (small_recipe, distilled)
    run = runs.create("r", before, "test")
    resuming.require_same_objective(run, before)
    with pytest.raises(UserError, match=r"train\.distill was (not )?set when the run began"):
        resuming.require_same_objective(run, after)


def test_stall_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(workers.time, "monotonic", lambda: now)
    stalls = StallDetector()
    now += workers.STILL_STARTING_S + 1
    assert "still starting after 21 s" in stalls.news()[0] and stalls.news() == []
    for _ in range(5):
        stalls.step()
        now += 0.5
        assert stalls.news() == []
    now += workers.STALL_S
    assert "No step for 6 s" in stalls.news()[0] and stalls.news() == []
    stalls.step()  # a reported stall does not raise the threshold
    now += workers.STALL_S + 1
    assert "No step" in stalls.news()[0]


def test_lost_node_is_reported() -> None:
    nodes = {key: {"NodeManagerAddress": f"10.0.0.{key}", "Resources": {"CPU": 2.0}} for key in "12"}
    one = {"1": nodes["1"]}
    assert changes({}, nodes) == [] == changes(nodes, nodes)
    assert changes(nodes, one) == ["Ray node 10.0.0.2 was lost; 1 are left, with 2 CPUs."]
    assert changes(one, nodes) == ["Ray node 10.0.0.2 has joined."]


def test_ray_train_errors_are_reduced_to_their_cause() -> None:
    from ray.exceptions import ActorDiedError
    from ray.train import ControllerError, WorkerGroupError
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/part")
    for error in (
        WorkerGroupError("worker 0 failed", {0: UserExceptionWithTraceback(full, "Traceback: many lines")}),
        ControllerError(full),
    ):
        explained = failures.explain(error, "r")
        assert isinstance(explained, UserError)
        assert explained.cause == "/data/part: No space left on device."
        assert explained.fix == "Free some space there, then resume with: strata train --resume r."
    own = UserError("cause", "fix")
    assert failures.explain(WorkerGroupError("", {3: UserExceptionWithTraceback(own, "")}), "r") is own
    lost = failures.explain(WorkerGroupError("", {1: ActorDiedError()}), "r")
    assert (
        isinstance(lost, UserError)
        and "more often than train.max_failures allows: The actor died" in lost.cause
        and "--resume r" in lost.fix
    )
    assert failures.explain(WorkerGroupError("", {1: ZeroDivisionError()}), "r") is None


@pytest.mark.parametrize(("mine", "restarts", "goes_on"), [(True, 0, True), (True, 3, False), (False, 0, False)])
def test_run_restarts_its_own_cluster_a_few_times(
    home: Path,
    small_recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mine: bool,
    restarts: int,
    goes_on: bool,
) -> None:
    """The restart replaces the process, because Ray cannot be started again in this one."""

    class Replaced(Exception):
        pass

    def start(*_: object) -> None:
        raise ClusterDied("Ray has died.", "Resume with: strata train --resume r", "r" if mine else None)

    def execute(program: str, words: list[str]) -> None:
        assert words[-3:] == ["train", "--resume", "r"] and os.environ[commands.RESTARTS] == str(restarts + 1)
        raise Replaced

    monkeypatch.setattr(driver, "start", start)
    monkeypatch.setattr(commands.os, "execv", execute)
    monkeypatch.setenv(commands.RESTARTS, str(restarts))
    with pytest.raises(Replaced if goes_on else UserError):
        commands.train()
    assert ("Ray has died. It is started again" in capsys.readouterr().out) == goes_on


def test_missing_storage_does_not_restart_a_run_at_step_0(
    tmp_path: Path, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that Ray restarts look for the newest checkpoint themselves."""
    without_ray(monkeypatch)
    sections = small_recipe.model, small_recipe.train, small_recipe.parallel
    saver = Saver(folder(tmp_path / "unmounted"), None, *sections, Origin({}, "tokens", 4, 0), lambda: None)
    assert saver.resume().step == 0
    with pytest.raises(UserError, match="The run saved a checkpoint at step 4"):
        saver.resume("", lambda: 4)
