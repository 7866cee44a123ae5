"""Checks and messages for a resumed run: lost checkpoints, a changed schedule, leftovers of a kill."""

from strata.platform.errors import UserError
from strata.platform.files import remove_leftovers
from strata.platform.recipe import Recipe
from strata.platform.runs import Run, State
from strata.training.checkpoint import export, format, ownership
from strata.training.checkpoint.ownership import Place
from strata.training.metrics.records import Record
from strata.training.schedule.learning_rate import learning_rate

OBJECTIVES = ("preference", "distill", "flow")  # sections and keys of `train` that replace the loss of next tokens
SCHEDULE = ("lr", "steps", "warmup", "min_lr_ratio", "schedule")


def require_nothing_lost(run: Run, place: Place, history: list[Record]) -> None:
    """Decides about a run without a loadable checkpoint. A run that was stopped before its first checkpoint starts again at step
    0. A run that had one is refused: its storage is not mounted, `train.checkpoints` points elsewhere, or files are missing."""
    state = run.state() if run.has_state() else State("unknown")
    reached = max([state.step, *(record["step"] for record in history)])
    if reached == 0:
        return
    saved = max([state.saved, *(record.get("checkpoint_step", 0) for record in history)])
    here = place.checkpoints
    left = [name for name in here.names() if name.startswith("step-") and not format.is_unfinished(here / name)]
    known = place.is_claimed_by(ownership.identity_of(run, place))
    if saved == 0 and known and not left and state.status != "finished":
        return  # stopped before its first checkpoint, which would have been in this folder
    found = f"{', '.join(sorted(left)[-3:])} cannot be loaded" if left else "there is no checkpoint"
    cause = f"Run '{run.name}' has reached step {reached} by its records, but {found} in {here.path}; nothing was changed."
    fix = "Restore the files, mount the storage, or set train.checkpoints to the folder that has them. "
    raise UserError(cause, f"{fix}To start over at step 0, start a new run: --run NAME.")


def require_same_objective(run: Run, recipe: Recipe) -> None:
    """Refuses a loss of another kind: the run's losses before and after could not be compared, nor its best checkpoint chosen."""
    try:
        before = run.recipe().train
    except UserError:
        return
    for key in OBJECTIVES:
        then, now = getattr(before, key), getattr(recipe.train, key)
        if (then is None) != (now is None):
            words = ("was set when the run began and is not now", "was not set when the run began and is now")[then is None]
            raise UserError(f"train.{key} {words}: it decides the loss.", f"Restore train.{key}, or start a new run.")


def schedule_changes(run: Run, recipe: Recipe, step: int) -> list[str]:
    """A line for the user if the recipe's schedule changed and the learning rate of the next step with it."""
    try:
        before, after = run.recipe().train, recipe.train
    except UserError:
        return []
    changed = [key for key in SCHEDULE if getattr(before, key) != getattr(after, key)]
    if not changed or step == 0 or step >= after.steps:
        return []
    what = ", ".join(f"train.{key} from {getattr(before, key)} to {getattr(after, key)}" for key in changed)
    planned, now = learning_rate(step, before), learning_rate(step, after)
    return [f"Changed {what}: the learning rate of step {step + 1} jumps from {planned:.3g} to {now:.3g}."]


def tidy(run: Run) -> None:
    """Removes partial files of writes that were killed."""
    remove_leftovers(run.path, "state.json", "recipe.yaml", "metrics.jsonl", "samples.jsonl", "run.json")
    export.finish_or_remove_leftovers(run.export)
