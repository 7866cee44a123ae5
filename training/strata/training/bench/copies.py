"""Benchmark of the cost of memory copies in a step.

A run makes a copy after every second step. A copy overlaps the next step and is complete before that step's update, so steps with
and without a copy alternate within one run, and other load on the machine affects both alike.
"""

import json
import statistics
import tempfile
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.platform.recipe import Recipe
from strata.training.bench import launch, report
from strata.training.bench.contest import Job, shortened
from strata.training.bench.ours import has_ray
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.memory_copies import folders
from strata.training.metrics.records import Record

EVERY = 2


@dataclass(frozen=True)
class Measured:
    """Seconds of steps that had a copy beside them, of those that had none, and of the copies themselves."""

    with_copy: list[float]
    without: list[float]
    copies: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.with_copy) / statistics.median(self.without)


def bench(recipe: Recipe, steps: int, warmup: int, rounds: int, ray: bool, path: Path | None) -> Measured:
    """Prints a table and writes JSON to `path`, by default in the cache folder."""
    if warmup >= steps - EVERY:
        raise UserError(f"--warmup {warmup} leaves too few of --steps {steps} to measure.", "Raise --steps or lower --warmup.")
    console = Console(highlight=False, soft_wrap=True)
    with console.status("reading the corpus"):
        tokens = shards.prepare(open_corpus(recipe.data), recipe.model.vocab, recipe.data.holdout)
    short = shortened(recipe, steps)
    short = short.model_copy(update={"train": short.train.model_copy(update={"memory_copy_every": EVERY})})
    with_ray = ray and has_ray()
    found: list[Measured] = []
    for number in range(rounds):
        name = f"round {number + 1} of {rounds}"
        with console.status(name):
            found.append(measure(_history(short, with_ray, tokens), warmup))
        console.print(f"{name}: {found[-1].ratio:.4f}")
    whole = Measured(*([value for one in found for value in getattr(one, key)] for key in ("with_copy", "without", "copies")))
    result = Table("steps", "median", "÷ without a copy", box=None, header_style="bold")
    result.add_row("without a copy", f"{1000 * statistics.median(whole.without):.2f} ms", "1.0000")
    result.add_row("with a copy", f"{1000 * statistics.median(whole.with_copy):.2f} ms", f"{whole.ratio:.4f}")
    result.add_row("the copy itself", f"{1000 * statistics.median(whole.copies):.2f} ms", "")
    console.print(result)
    target = path or cache_dir() / "bench" / "memory-copies.json"
    write_atomic(target, json.dumps(as_json(short, warmup, with_ray, found, whole), indent=2))
    console.print(f"written to {target}")
    return whole


def measure(history: list[Record], warmup: int) -> Measured:
    """Step times are differences between consecutive records. A copy begins after the earlier one of them is recorded."""
    steps = list(pairwise(history))[warmup:]
    copied = [(before, after) for before, after in steps if before["step"] % EVERY == 0]
    if not all("memory_copy_s" in after for _, after in copied):
        raise UserError("The run made no copies: it has too little memory for them.", "Free memory, or measure a smaller model.")
    alone = [after["time"] - before["time"] for before, after in steps if before["step"] % EVERY]
    return Measured(
        [after["time"] - before["time"] for before, after in copied], alone, [after["memory_copy_s"] for _, after in copied]
    )


def _history(recipe: Recipe, with_ray: bool, tokens: Path) -> list[Record]:
    work = cache_dir() / "bench"
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=work, prefix=".copies-"))
        job = Job(contender="ours", recipe=recipe, tokens=tokens, folder=Path(folder))
        if not with_ray:  # otherwise the driver of the run owns the folder
            job = job.model_copy(update={"run": uuid.uuid4().hex})
            stack.enter_context(folders.owned(job.run))
        try:
            return launch.run(job, with_ray, work, lambda _: None)
        except launch.Failed as failure:
            raise UserError(f"The measured training run failed: {failure}", "Try the recipe with 'strata train'.") from None


def as_json(recipe: Recipe, warmup: int, with_ray: bool, rounds: list[Measured], whole: Measured) -> dict[str, Any]:
    return report.circumstances("memory-copies", recipe) | {
        "warmup_steps": warmup,
        "with_ray": with_ray,
        "median_seconds": {
            "with_copy": statistics.median(whole.with_copy),
            "without": statistics.median(whole.without),
            "copy": statistics.median(whole.copies),
        },
        "ratio": whole.ratio,
        "rounds": [{"ratio": one.ratio, "with_copy": one.with_copy, "without": one.without} for one in rounds],
    }
