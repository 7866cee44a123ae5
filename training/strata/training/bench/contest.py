"""Job of a benchmark contender, and the measurements of a round."""

import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from strata.platform.errors import UserError, shown
from strata.platform.recipe import Recipe, Section
from strata.training.metrics.records import Record

Contender = Literal["ours", "ours_torch", "ours_liger", "bare", "liger", "liger_compiled"]
LIGER: tuple[Contender, ...] = ("liger", "liger_compiled")
OURS: tuple[Contender, ...] = ("ours", "ours_torch", "ours_liger")  # with the recipe's, torch's and Liger's kernels


def contenders(names: list[str] | None) -> tuple[Contender, ...]:
    for name in names or ():
        if name not in get_args(Contender):
            raise UserError(f"There is no contender '{shown(name)}'.", f"Choose from {', '.join(get_args(Contender))}.")
    return tuple(names or ())  # type: ignore[arg-type]


class Job(Section):
    """Input of a contender's processes, passed as JSON on their command line. `folder` is private to contender and round."""

    contender: Contender
    recipe: Recipe
    tokens: Path
    folder: Path
    mix: tuple[float, ...] = ()  # weights of the sets in `tokens`, for fine-tuning
    run: str = ""  # id of the folder for memory copies, without Ray; empty: none are made

    @property
    def metrics(self) -> Path:
        """File of rank 0's step records, in the format of a run."""
        return self.folder / "metrics.jsonl"


@dataclass(frozen=True)
class Round:
    """Measurements of one round. `step_seconds` excludes the first steps, which compile and warm up."""

    step_seconds: list[float]
    tokens_per_s: float
    final_loss: float
    peak_memory_bytes: int | None


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """Recipe with `steps` steps, and one evaluation and one checkpoint after the last timed step."""
    changes = {
        "steps": steps,
        "time_budget_s": None,
        "warmup": min(recipe.train.warmup, steps - 1),
        "eval_every": steps,
        "eval_sequences": 1,
        "checkpoint_every": steps,
        "checkpoints": None,
        "max_failures": 0,
        "epochs": None,
        "early_stop": None,
    }
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def on_kernels_of(contender: Contender, recipe: Recipe) -> Recipe:
    kernels = {"ours_torch": "torch", "ours_liger": "liger"}.get(contender)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"kernels": kernels})}) if kernels else recipe


def accumulation(recipe: Recipe) -> int:
    """Gradient accumulation steps of a peer. Peers are always data parallel, whatever the recipe's layout."""
    sequences = recipe.parallel.workers * recipe.train.micro_batch
    if recipe.train.batch % sequences:
        raise UserError(
            f"The peers are data parallel: train.batch={recipe.train.batch} must be a multiple of "
            f"parallel.workers x train.micro_batch = {sequences}.",
            "Change train.batch, train.micro_batch or parallel.workers.",
        )
    return recipe.train.batch // sequences


def measure(history: list[Record], recipe: Recipe, warmup: int) -> Round:
    """Step times are differences between consecutive records, so work between steps counts too."""
    seconds = [record["time"] - before["time"] for before, record in pairwise(history)][warmup - 1 :]
    return Round(
        step_seconds=seconds,
        tokens_per_s=recipe.train.batch * recipe.model.context / statistics.median(seconds),
        final_loss=history[-1]["loss"],
        peak_memory_bytes=history[-1].get("peak_memory_bytes"),
    )
