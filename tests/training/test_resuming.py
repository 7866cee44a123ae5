"""Words on a run that is resumed: a schedule that jumps, steps that do not come, and what Ray's errors mean."""

import errno
import os
from pathlib import Path

import pytest

from strata.platform import runs
from strata.platform.cluster_watch import changes
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.training import failures, resuming, workers
from strata.training.workers import Quiet


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
def test_a_schedule_that_jumps_is_said(
    home: Path, small_recipe: Recipe, values: dict[str, object], step: int, line: str | None
) -> None:
    before = changed(small_recipe, lr=0.01)
    run = runs.create("r", before, "test")
    said = resuming.schedule_changes(run, changed(before, **values), step)
    assert [text.startswith(line or "") for text in said] == ([True] if line else [])


def test_quiet_says_once_that_no_step_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(workers.time, "monotonic", lambda: now)
    quiet = Quiet()
    now += workers.STILL_STARTING_S + 1
    assert "still starting after 21 s" in quiet.news()[0] and quiet.news() == []
    for _ in range(5):
        quiet.heard()
        now += 0.5
        assert quiet.news() == []
    now += workers.QUIET_S
    assert "No step for 6 s" in quiet.news()[0] and quiet.news() == []
    quiet.heard()  # the wait for workers that were started again does not make it more patient
    now += workers.QUIET_S + 1
    assert "No step" in quiet.news()[0]


def test_a_lost_node_is_said() -> None:
    nodes = {key: {"NodeManagerAddress": f"10.0.0.{key}", "Resources": {"CPU": 2.0}} for key in "12"}
    one = {"1": nodes["1"]}
    assert changes({}, nodes) == [] == changes(nodes, nodes)
    assert changes(nodes, one) == ["Ray node 10.0.0.2 was lost; 1 are left, with 2 CPUs."]
    assert changes(one, nodes) == ["Ray node 10.0.0.2 has joined."]


def test_errors_of_ray_train_are_reduced_to_their_cause() -> None:
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
        assert explained.fix == "Free some space there, then go on with: strata train --resume r."
    own = UserError("cause", "fix")
    assert failures.explain(WorkerGroupError("", {3: UserExceptionWithTraceback(own, "")}), "r") is own
    lost = failures.explain(WorkerGroupError("", {1: ActorDiedError()}), "r")
    assert isinstance(lost, UserError) and "more often than train.max_failures" in lost.cause and "--resume r" in lost.fix
    assert failures.explain(WorkerGroupError("", {1: ZeroDivisionError()}), "r") is None
