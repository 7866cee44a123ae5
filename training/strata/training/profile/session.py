"""A short training run whose chosen steps are profiled: as `strata train` runs, or without Ray."""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.files import cache_dir
from strata.platform.recipe import Recipe
from strata.training.bench import launch
from strata.training.bench.contest import Job
from strata.training.bench.ours import run_metrics
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.profile import nsight, request
from strata.training.profile.request import Request

POLL_S = 0.05


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """Recipe that ends after `steps` steps. Evaluations and checkpoints stay where the recipe has them: they are profiled too."""
    changes = {
        "steps": steps,
        "time_budget_s": None,
        "warmup": min(recipe.train.warmup, steps - 1),
        "checkpoints": None,
        "max_failures": 0,
        "epochs": None,
        "early_stop": None,
    }
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def train(recipe: Recipe, wanted: Request, target: Path, with_ray: bool, console: Console) -> None:
    """Trains one step more than the profile needs, because a run evaluates and saves after its last step. Moves the traces into
    the folder `target`."""
    if recipe.model.family or recipe.model.picture:
        raise UserError(
            "'strata profile train' trains on a corpus, and the recipe fine-tunes a model or draws pictures.",
            "Start it with 'strata train', and profile it with 'strata profile run NAME' in another terminal.",
        )
    under = nsight.command(wanted.tool, recipe, target.resolve())
    _require_gpus(recipe)
    target.mkdir(parents=True, exist_ok=True)
    with console.status("reading the corpus"):
        tokens = shards.prepare(open_corpus(recipe.data), recipe.model.vocab, recipe.data.holdout)
    work = cache_dir() / "bench"
    work.mkdir(parents=True, exist_ok=True)
    recipe = shortened(recipe, wanted.last + 1)
    with tempfile.TemporaryDirectory(dir=work, prefix=".profile-") as folder, console.status("starting") as status:
        job = Job(contender="ours", recipe=recipe, tokens=tokens, folder=Path(folder))
        with_ray = with_ray and not under  # Ray starts its workers itself
        run = run_metrics(job).parent if with_ray else job.folder
        with _requested(run, wanted, exists=not with_ray):
            try:
                launch.run(job, with_ray, work, _progress(status.update, wanted), under)
            except launch.Failed as failure:
                raise UserError(f"The profiled run failed: {failure}", "Try the recipe with 'strata train'.") from None
        if not under:
            collect(wanted.folder(run), target)


def _require_gpus(recipe: Recipe) -> None:
    if recipe.parallel.device != "gpu":
        return
    import torch

    if torch.cuda.device_count() < recipe.parallel.workers:
        raise UserError(
            f"parallel.workers={recipe.parallel.workers} needs as many GPUs; this machine has {torch.cuda.device_count()}.",
            "Set parallel.device=cpu, or lower parallel.workers.",
        )


def _progress(update: Callable[[str], None], wanted: Request) -> Callable[[int], None]:
    return lambda step: update(f"step {step} of {wanted.last + 1}; steps {wanted.first} to {wanted.last} are profiled")


@contextmanager
def _requested(run: Path, wanted: Request, exists: bool) -> Iterator[None]:
    """Writes the request into the run's folder, as soon as there is one."""
    if exists:
        request.write(run, wanted)
        yield
        return
    over = threading.Event()

    def wait() -> None:
        while not over.wait(POLL_S):
            if (run / "recipe.yaml").exists():
                request.write(run, wanted)
                return

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def collect(source: Path, target: Path) -> None:
    """Moves the traces of a profile, and removes those of an older one."""
    if not any(source.glob("rank*.trace.json.gz")):
        raise UserError("The run ended without a profile.", "Choose steps that the run trains, and ranks that it has.")
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("rank*"):
        old.unlink()
    for file in source.iterdir():
        shutil.move(file, target / file.name)
