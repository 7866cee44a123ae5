"""Checks and messages of a run that is resumed: lost checkpoints, a changed schedule, leftovers of a kill."""

from strata.platform.errors import UserError
from strata.platform.files import remove_leftovers
from strata.platform.recipe import Recipe, TrainSection
from strata.platform.runs import Run, State
from strata.training.checkpoint import export, format, ownership
from strata.training.checkpoint.ownership import Place
from strata.training.metrics.records import Record
from strata.training.schedule import learning_rate

SCHEDULE = ("lr", "steps", "warmup", "min_lr_ratio")


def require_nothing_lost(run: Run, place: Place, history: list[Record]) -> None:
    """For a run without a checkpoint that can be loaded. One that was stopped before its first begins again at step 0; one that
    had a checkpoint is refused: its storage is not mounted, `train.checkpoints` points elsewhere, or files are missing."""
    state = run.state() if run.has_state() else State("unknown")
    reached = max([state.step, *(record["step"] for record in history)])
    if reached == 0:
        return
    saved = max([state.saved, *(record.get("checkpoint_step", 0) for record in history)])
    here = place.checkpoints
    left = [name for name in here.names() if name.startswith("step-") and not format.is_cut_short(here / name)]
    known = place.is_claimed_by(ownership.identity_of(run, place))
    if saved == 0 and known and not left and state.status != "finished":
        return  # stopped before its first checkpoint, and this is the place where it would have been
    found = f"what is left of {', '.join(sorted(left)[-3:])} cannot be loaded" if left else "there is no checkpoint"
    cause = f"Run '{run.name}' has reached step {reached} by its records, and {found} in {here.path}; nothing was changed."
    fix = "Restore the files, mount the storage, or set train.checkpoints to the place that has them. "
    raise UserError(cause, f"{fix}To begin again at step 0, start a new run: --run NAME.")


def schedule_changes(run: Run, recipe: Recipe, step: int) -> list[str]:
    """One line if the learning rate of the next step is not the one that the run had planned."""
    try:
        before, after = run.recipe().train, recipe.train
    except UserError:
        return []
    changed = [key for key in SCHEDULE if getattr(before, key) != getattr(after, key)]
    if not changed or step == 0 or step >= after.steps:
        return []
    what = ", ".join(f"train.{key} from {getattr(before, key)} to {getattr(after, key)}" for key in changed)
    planned, now = _rate(step, before), _rate(step, after)
    return [f"Changed {what}: the learning rate of step {step + 1} jumps from {planned:.3g} to {now:.3g}."]


def _rate(step: int, train: TrainSection) -> float:
    return learning_rate(step, train.steps, train.lr, train.warmup, train.min_lr_ratio)


def tidy(run: Run) -> None:
    """Removes what writes of ours left half done when they were killed."""
    remove_leftovers(run.path, "state.json", "recipe.yaml", "metrics.jsonl", "run.json")
    export.finish_or_remove_leftovers(run.export)
