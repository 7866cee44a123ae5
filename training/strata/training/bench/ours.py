"""Strata as a benchmark contender: `strata train` as a user runs it, or the same loop without Ray where it is not installed."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from strata.platform import recipe_file
from strata.platform.files import cache_dir
from strata.training.bench.contest import Job
from strata.training.metrics.records import Record

if TYPE_CHECKING:
    from strata.training.loop import Job as LoopJob

RUN = "bench"


def has_ray() -> bool:
    return find_spec("ray") is not None


def prepare_home(job: Job) -> list[str]:
    """Command that trains with `job.folder` as STRATA_HOME. Only the tokens are shared with the other contenders."""
    recipe = job.folder / "recipe.yaml"
    recipe.write_text(recipe_file.dump(job.recipe))
    cache = job.folder / cache_dir().name
    cache.mkdir()
    (cache / "tokens").symlink_to(job.tokens.parent)
    return [sys.executable, "-m", "strata.platform.cli", "train", "--recipe", str(recipe), "--run", RUN]


def run_metrics(job: Job) -> Path:
    return job.folder / "runs" / RUN / "metrics.jsonl"


def run_ours_without_ray(job: Job, report: Callable[[Record], None]) -> None:
    """Runs the training loop on every rank of an initialized process group."""
    from strata.training import loop

    outcome = loop.run_local(loop_job(job), report)
    if outcome.problem:
        raise outcome.problem


def loop_job(job: Job) -> "LoopJob":
    from strata.training.loop import Job as LoopJob

    recipe = job.recipe
    return LoopJob(job.folder, job.tokens, recipe.model, recipe.train, recipe.parallel, id=job.run, mix=job.mix)
