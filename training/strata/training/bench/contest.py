"""What every contender is given, and what is taken down of it."""

import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from strata.platform.errors import UserError
from strata.platform.recipe import Recipe, Section
from strata.training.metrics.records import Record

Contender = Literal["ours", "ours_torch", "ours_liger", "bare", "liger", "liger_compiled"]
LIGER: tuple[Contender, ...] = ("liger", "liger_compiled")
OURS: tuple[Contender, ...] = ("ours", "ours_torch", "ours_liger")  # on the recipe's kernels, and on others'


class Job(Section):
    """As JSON on the command line of a contender's processes. `folder` is the contender's own, for this round."""

    contender: Contender
    recipe: Recipe
    tokens: Path
    folder: Path

    @property
    def metrics(self) -> Path:
        """Where rank 0 lists its steps, as a run does."""
        return self.folder / "metrics.jsonl"


@dataclass(frozen=True)
class Round:
    """One contender's turn. `step_seconds` are those that count, without the first ones, which compile and warm up."""

    step_seconds: list[float]
    tokens_per_s: float
    final_loss: float
    peak_memory_bytes: int | None


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """`steps` steps and nothing but steps: one evaluation and one checkpoint at the end, after the last that is timed."""
    changes = {
        "steps": steps,
        "warmup": min(recipe.train.warmup, steps - 1),
        "eval_every": steps,
        "eval_sequences": 1,
        "checkpoint_every": steps,
        "checkpoints": None,
        "max_failures": 0,
    }
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def on_kernels_of(contender: Contender, recipe: Recipe) -> Recipe:
    kernels = {"ours_torch": "torch", "ours_liger": "liger"}.get(contender)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"kernels": kernels})}) if kernels else recipe


def accumulation(recipe: Recipe) -> int:
    """Of a peer, whose workers are all data parallel, whatever our layout is."""
    share = recipe.parallel.workers * recipe.train.micro_batch
    if recipe.train.batch % share:
        raise UserError(
            f"The peers are data parallel: train.batch={recipe.train.batch} must be a multiple of "
            f"parallel.workers x train.micro_batch = {share}.",
            "Change one of them.",
        )
    return recipe.train.batch // share


def measure(history: list[Record], recipe: Recipe, warmup: int) -> Round:
    """A step lasts from the record before it to its own, so all that a loop does between steps counts."""
    seconds = [record["time"] - before["time"] for before, record in pairwise(history)][warmup - 1 :]
    return Round(
        step_seconds=seconds,
        tokens_per_s=recipe.train.batch * recipe.model.context / statistics.median(seconds),
        final_loss=history[-1]["loss"],
        peak_memory_bytes=history[-1].get("peak_memory_bytes"),
    )
