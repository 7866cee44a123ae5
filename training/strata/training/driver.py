"""Driver of a training run: checks and prepares it, follows Ray Train's workers, and exports the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.recipe import ModelSection, Recipe
from strata.platform.runs import Run, State
from strata.training.checkpoint import format, ownership, resuming
from strata.training.checkpoint.export import export_run
from strata.training.checkpoint.storage import Folder
from strata.training.diffusion import evaluation as picture_evaluation
from strata.training.diffusion import progress as picture_progress
from strata.training.evaluation import samples
from strata.training.interrupts import Interrupts, caught
from strata.training.logs import attempts
from strata.training.loop import Job
from strata.training.memory_copies import folders, recovery
from strata.training.metrics import records
from strata.training.metrics.plot import plot_losses
from strata.training.preparation import prepare
from strata.training.schedule.learning_rate import Plan
from strata.training.schedule.time_budget import recorded
from strata.training.workers import run_workers


@dataclass(frozen=True)
class DrawnPictures:
    """Result of a picture model: the last grid, and the judge's line about held-out captions, None if it did not judge."""

    grid: Path | None
    verdict: str | None


@dataclass(frozen=True)
class Summary:
    """Result of a training run."""

    run: Run
    step: int  # the last one
    val_loss: float | None  # nats per token; None before the first evaluation
    perplexity: float | None  # of val_loss; None for preferences too, whose loss is not that of tokens
    bigram: float | None  # the validation loss of a bigram model, the bar to beat; None for fine-tuning
    export: Path | None  # folder in Hugging Face's format; None for a run that was interrupted
    pictures: DrawnPictures | None = None  # of a picture model
    agreement: float | None = None  # of a distilled model: share of held-out tokens whose greedy choice is the teacher's


def start(recipe: Recipe, name: str | None, stem: str, console: Console) -> Summary:
    """Trains a new run, called `name` or else `<stem>-<number>`."""
    with caught() as interrupts:
        run = runs.create(name, recipe, stem)
        checkpoints = format.location(run, recipe.train)
        with _settled(run, console, fresh=checkpoints), run.locked():
            ownership.claim_new(run, checkpoints)
            job, bigram = prepare(run, recipe, console)
            if job.train != recipe.train:  # its steps follow from its epochs
                write_atomic(run.path / "recipe.yaml", recipe_file.dump(recipe.model_copy(update={"train": job.train})))
            return _train(replace(job, id=run.id() or ""), bigram, interrupts, console)


def resume(run: Run, recipe: Recipe, console: Console, take_over: bool = False) -> Summary:
    """Continues from the newest good checkpoint, from a newer copy in memory that a killed driver left, or from the beginning if
    the run was killed before its first checkpoint. The run's folder does not change before all checks have passed.

    With `take_over` the caller guarantees that a driver on another machine, which cannot be seen from here, is gone."""
    with caught() as interrupts, run.locked():
        _require_free(run, take_over, console)
        place = ownership.require_own(run, format.location(run, recipe.train))
        job, bigram = prepare(run, recipe, console)
        recipe = recipe.model_copy(update={"train": job.train})
        history = records.read(run.metrics)
        found = format.newest(job.checkpoints, console.print)
        if found:
            _require_same(found.origin, job.origin)
            job = replace(job, verified=found.identity)
        else:
            resuming.require_nothing_lost(run, place, history)
        resuming.require_same_objective(run, recipe)
        stored = found.step if found else 0
        step = max(stored, _in_memory(replace(job, id=ownership.identity_of(run, place) or "")))
        if step > recipe.train.steps:
            raise UserError(f"Run '{run.name}' is at step {step} already.", f"Set more steps: train.steps={2 * step}.")
        for line in resuming.schedule_changes(run, recipe, step):
            console.print(line)
        write_atomic(run.path / "recipe.yaml", recipe_file.dump(recipe))
        job = replace(job, id=ownership.claim_own(run, place), begun=step, stored=stored)
        _discard_after(job, console)
        resuming.tidy(run)
        run.write_running(State("running", step, recipe.train.steps, saved=stored))
        with _settled(run, console):
            return _train(job, bigram, interrupts, console)


def start_or_resume(recipe: Recipe, name: str, stem: str, console: Console) -> Summary | None:
    """Trains a new run or continues it, for a job that one controller retries until it succeeds and never runs twice
    concurrently. Returns None if the run is finished. The recipe given may change what a resume allows, such as train.steps."""
    if not runs.exists(name):
        return start(recipe, name, stem, console)
    run = runs.find(name)
    try:
        changed = _changes(run.recipe(), recipe)
    except UserError as damage:
        console.print(f"{damage.cause} The run continues by the recipe given.")
        changed = []
    if changed:
        console.print(f"Run '{name}' exists; its recipe changes in {', '.join(changed)}.")
    elif run.has_state() and run.state().status == "finished" and run.has_export():
        return None
    return resume(run, recipe, console, take_over=True)


def _changes(then: Recipe, now: Recipe) -> list[str]:
    """Keys of the sections that training reads which differ. A changed serve section does not make it another run."""
    before, after = (recipe.model_dump(include={"model", "data", "train", "parallel"}) for recipe in (then, now))
    changed = [f"{section}.{key}" for section in after for key in after[section] if before[section][key] != after[section][key]]
    return [key for key in changed if key != "train.steps" or now.train.epochs is None]


def _require_free(run: Run, take_over: bool, console: Console) -> None:
    if not run.has_state():
        console.print(f"Run '{run.name}' has lost its state.json; its checkpoints and metrics show its step.")
        return
    state = run.state()
    if state.observed_status() == "running":
        raise UserError(f"Run '{run.name}' is being trained by process {state.pid}.", "Wait for it, or stop it there (Ctrl-C).")
    if state.elsewhere() and not take_over:
        again = f"strata train --recipe {run.path}/recipe.yaml --run {run.name} --or-resume"
        fix = f"Stop it there; if that machine is gone, continue with: {again}"
        raise UserError(f"Run '{run.name}' is being trained on {state.host}, or was when that machine went away.", fix)
    if state.elsewhere():
        console.print(f"Run '{run.name}' was last trained on {state.host}; it continues here.")


def _train(job: Job, bigram: float | None, interrupts: Interrupts, console: Console) -> Summary:
    run = Run(job.run)
    stopped, step = False, job.begun
    steps = _planned(run, job).steps
    if job.begun < steps or (steps == 0 and not format.step_names(job.checkpoints)):
        outcome = run_workers(job, interrupts, console)
        if outcome.problem:
            raise outcome.problem
        stopped, step = outcome.stopped, outcome.step
        steps = _planned(run, job).steps if stopped else step
    history = records.read(run.metrics)
    if history:
        plot_losses(history, bigram, run.plot)
    export = None if stopped else export_run(run, None, console.print)
    loss = history[-1]["loss"] if history else None
    evaluated = next((record for record in reversed(history) if "val_loss" in record), None)
    val_loss = evaluated["val_loss"] if evaluated else None
    perplexity = records.perplexity(evaluated) if evaluated else None
    layout = history[-1].get("layout", "") if history else ""
    run.write_state(State("interrupted" if stopped else "finished", step, steps, loss, val_loss, saved=step, layout=layout))
    agreement = evaluated.get("distillation", {}).get("agreement") if evaluated else None
    return Summary(run, step, val_loss, perplexity, bigram, export, _drawn(job, export, console), agreement)


def _drawn(job: Job, export: Path | None, console: Console) -> DrawnPictures | None:
    flow = job.train.flow
    if flow is None:
        return None
    found = None
    if export:
        with console.status("judging pictures of held-out captions"):
            found = picture_evaluation.judged(export, job.tokens, job.model, flow)
    return DrawnPictures(picture_progress.newest(Run(job.run)), picture_evaluation.line(found, flow.judged) if found else None)


def _planned(run: Run, job: Job) -> Plan:
    """The recipe's steps, or fewer in a run with a time budget."""
    history = records.read(run.metrics)
    return recorded(history[-1] if history else None, job.train)[0]


def _in_memory(job: Job) -> int:
    """Step of the newest copy in memory that a killed driver left on this machine and that a resume can use, 0 for none. The
    last step is not one: it has to be saved."""
    spare = folders.spare_records(job.id) if job.train.memory_copy_every else None
    copy = recovery.newest(job.id, job.origin) if spare else None
    if spare is None or copy is None or copy.step >= job.train.steps:
        return 0
    recorded_to = max(records.last_step(Run(job.run).metrics), records.last_step(spare))
    return copy.step if copy.step <= recorded_to else 0


def _discard_after(job: Job, console: Console) -> None:
    """Sets aside checkpoints, and cuts metrics, beyond the step from which workers will continue."""
    if spare := folders.spare_records(job.id):
        records.restore(Run(job.run).metrics, spare)
    for name in format.set_aside_after(job.checkpoints, job.begun):
        console.print(f"Files beyond step {job.begun}, which cannot be used, were moved to {job.checkpoints.path}/{name}.")
    records.cut(Run(job.run).metrics, job.begun)
    samples.cut(Run(job.run), job.begun)
    picture_progress.cut(Run(job.run), job.begun)


@contextmanager
def _settled(run: Run, console: Console, fresh: Folder | None = None) -> Iterator[None]:
    """Writes how the run ended into its state. A new run that has not finished a step leaves no folder, and no claim on its
    checkpoints' folder (`fresh`). A full or lost disk does not hide the error that ended the run."""
    try:
        yield
    except BaseException as error:
        try:
            if fresh and not records.read(run.metrics) and run.id() not in ownership.look(run, fresh).writers:
                ownership.release(run, fresh)
                attempts.set_aside(run)  # they have the reason
                run.remove()
            else:
                run.write_state(replace(run.state(), status="interrupted" if isinstance(error, KeyboardInterrupt) else "failed"))
        except (UserError, OSError) as second:
            console.print(f"How the run ended could not be written to {run.path}: {str(second).splitlines()[0]}")
        raise


def _completed(model: dict[str, Any]) -> dict[str, Any]:
    """Model section of a checkpoint, with the defaults of keys that did not exist when it was written."""
    try:
        return ModelSection(**model).model_dump(mode="json")
    except ValidationError:
        return model


def _require_same(then: format.Origin, now: format.Origin) -> None:
    model = _completed(then.model)
    if model != now.model:
        changed = next(key for key in now.model if now.model[key] != model.get(key))
        cause = f"model.{changed} was {model.get(changed)} when the run began and is {now.model[changed]} now."
        raise UserError(cause, "Restore the model section, or start a new run.")
    if then.tokens != now.tokens:
        raise UserError("The corpus is not the one the run began with.", "Restore it (or data.*), or start a new run.")
    for key in ("batch", "seed"):
        before = getattr(then, key)
        if before != getattr(now, key):  # sequences would be repeated or left out
            cause = f"train.{key} was {before} when the run began and is {getattr(now, key)} now: it decides the data's order."
            raise UserError(cause, f"Resume with train.{key}={before}, or start a new run.")
