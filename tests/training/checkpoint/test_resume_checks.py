"""Checks before a run is resumed: lost checkpoints and a changed schedule. Nothing trains."""

import pytest

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.platform.runs import Run, State
from strata.training.checkpoint import format, resuming
from strata.training.checkpoint.ownership import Place
from strata.training.checkpoint.storage import folder
from strata.training.metrics.records import Record

# warm-up of 3 steps to the peak, then a cosine from 0.01 to 0.001 in 8 steps
SCHEDULE = ("train.lr=0.01", "train.steps=11", "train.warmup=3", "train.min_lr_ratio=0.1", "train.batch=4", "train.micro_batch=1")


def recipe(*overrides: str) -> Recipe:
    return recipe_file.load("laptop", ["train.schedule=cosine", *SCHEDULE, *overrides])


def record(step: int, **more: int) -> Record:
    return Record(step=step, loss=1.0, lr=0.1, grad_norm=1.0, tokens_per_s=1.0, time=0.0, **more)  # type: ignore[typeddict-item]


@pytest.fixture
def run() -> Run:
    made = runs.create("r", recipe(), "test")
    made.set_id("mine")
    return made


def place(run: Run, *claims: str) -> Place:
    return Place(folder(run.checkpoints), True, False, dict.fromkeys(claims, ""), frozenset())


@pytest.mark.parametrize(
    ("state", "history", "claims", "reached"),
    [
        (State("running", 0), [], (), None),
        (State("running", 3), [], ("mine",), None),
        (State("running", 0), [record(3)], ("mine",), None),
        (State("running", 3), [record(5)], ("mine",), None),
        (State("running", 3), [], (), 3),  # a folder without a claim was never this run's
        (State("running", 3), [], ("other",), 3),
        (State("running", 3), [record(5), record(4)], (), 5),
        (State("running", 6), [record(5)], (), 6),
        (State("finished", 3), [], ("mine",), 3),
        (State("running", 3, saved=2), [], ("mine",), 3),
        (State("running", 3), [record(3, checkpoint_step=2), record(4)], ("mine",), 4),
        (State("running", 1), [], (), 1),
    ],
)
def test_run_with_progress_and_without_checkpoints_is_refused(
    run: Run, state: State, history: list[Record], claims: tuple[str, ...], reached: int | None
) -> None:
    """Only a run that was stopped before its first checkpoint starts again at step 0."""
    run.write_state(state)
    if reached is None:
        resuming.require_nothing_lost(run, place(run, *claims), history)
        return
    with pytest.raises(UserError) as raised:
        resuming.require_nothing_lost(run, place(run, *claims), history)
    assert f"has reached step {reached} by its records, but there is no checkpoint in {run.checkpoints};" in raised.value.cause


def test_run_without_a_state_is_judged_by_its_records(run: Run) -> None:
    (run.path / "state.json").unlink()
    resuming.require_nothing_lost(run, place(run), [])
    with pytest.raises(UserError, match="has reached step 2"):
        resuming.require_nothing_lost(run, place(run), [record(2)])


def test_checkpoints_that_cannot_be_loaded_are_named(run: Run) -> None:
    """The newest three; interrupted writes do not count."""
    run.write_state(State("running", 3))
    for step in (4, 1, 3, 2):
        (run.checkpoints / f"step-0000000{step}").mkdir(parents=True)
        (run.checkpoints / f"step-0000000{step}" / "part").touch()
    unfinished = run.checkpoints / "step-00000009"
    unfinished.mkdir()
    (unfinished / format.UNFINISHED).touch()
    with pytest.raises(UserError) as raised:
        resuming.require_nothing_lost(run, place(run, "mine"), [])
    assert "but step-00000002, step-00000003, step-00000004 cannot be loaded in" in raised.value.cause


@pytest.mark.parametrize(
    ("overrides", "step", "line"),
    [
        # step 8 is in the middle of the decay: 0.001 + 0.009 / 2
        (["train.lr=0.02"], 7, "Changed train.lr from 0.01 to 0.02: the learning rate of step 8 jumps from 0.0055 to 0.011."),
        (
            ["train.steps=19", "train.min_lr_ratio=0.5"],
            11,
            "Changed train.steps from 11 to 19, train.min_lr_ratio from 0.1 to 0.5: the learning rate of step 12 jumps from"
            " 0.001 to 0.0075.",
        ),
        (["train.warmup=1"], 1, "Changed train.warmup from 3 to 1: the learning rate of step 2 jumps from 0.005 to 0.01."),
        (
            ["train.lr=0.02"],
            10,
            "Changed train.lr from 0.01 to 0.02: the learning rate of step 11 jumps from 0.00134 to 0.00269.",
        ),
        (["train.lr=0.02"], 11, None),
        (["train.lr=0.02"], 12, None),
        (["train.lr=0.02"], 0, None),
        (["train.seed=5"], 7, None),
        ([], 7, None),
    ],
)
def test_jump_of_the_learning_rate(run: Run, overrides: list[str], step: int, line: str | None) -> None:
    assert resuming.schedule_changes(run, recipe(*overrides), step) == ([line] if line else [])


def test_lost_recipe_has_no_schedule_to_compare(run: Run) -> None:
    (run.path / "recipe.yaml").unlink()
    assert resuming.schedule_changes(run, recipe("train.lr=0.02"), 7) == []


def test_partial_files_of_a_kill_are_removed(run: Run) -> None:
    names = [f".{name}.tmp" for name in ("state.json", "recipe.yaml", "metrics.jsonl", "run.json")]
    before = {path.name for path in run.path.iterdir()}
    for name in (*names, ".other.tmp"):
        (run.path / name).touch()
    resuming.tidy(run)
    assert {path.name for path in run.path.iterdir()} == before | {".other.tmp"}
