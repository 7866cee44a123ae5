"""Benchmark of the time for which checkpoints block the training loop, with asynchronous and synchronous uploads."""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.platform.recipe import Recipe
from strata.training.bench import launch, report
from strata.training.bench.contest import Job, shortened
from strata.training.data import shards
from strata.training.data.corpus import open_corpus

MODES = ("sync", "async")
STEPS_BETWEEN = 5  # enough for an upload to end before the next save, as in a real run


def bench(recipe: Recipe, saves: int, rounds: int, path: Path | None) -> dict[str, float]:
    """Returns the median stall of each mode in seconds. Excludes the first save of a run, which allocates the buffers."""
    console = Console(highlight=False, soft_wrap=True)
    with console.status("reading the corpus"):
        tokens = shards.prepare(open_corpus(recipe.data), recipe.model.vocab, recipe.data.holdout)
    stalls: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES:
            name = f"round {number + 1} of {rounds}: {mode}"
            with console.status(name):
                stalls[mode] += _measured(recipe, mode, saves, tokens)
            console.print(f"{name} {1000 * statistics.median(stalls[mode]):.1f} ms")
    medians = {mode: statistics.median(seconds) for mode, seconds in stalls.items()}
    result = Table("checkpoints", "stall", "÷ sync", box=None, header_style="bold")
    for mode, median in medians.items():
        result.add_row(mode, f"{1000 * median:.1f} ms", f"{median / medians['sync']:.3f}")
    console.print(result)
    target = path or cache_dir() / "bench" / "checkpoint.json"
    write_atomic(target, json.dumps(as_json(recipe, stalls, medians), indent=2))
    console.print(f"written to {target}")
    return medians


def _measured(recipe: Recipe, mode: str, saves: int, tokens: Path) -> list[float]:
    work = cache_dir() / "bench"
    work.mkdir(parents=True, exist_ok=True)
    short = shortened(recipe, STEPS_BETWEEN * (saves + 2))
    changes = {"checkpoint_upload": mode, "checkpoint_every": STEPS_BETWEEN}
    short = short.model_copy(update={"train": short.train.model_copy(update=changes)})
    with tempfile.TemporaryDirectory(dir=work, prefix=".checkpoint-") as folder:
        job = Job(contender="ours", recipe=short, tokens=tokens, folder=Path(folder))
        try:
            history = launch.run(job, True, work, lambda _: None)
        except launch.Failed as failure:
            raise UserError(f"The measured training run failed: {failure}", "Try the recipe with 'strata train'.") from None
    return [record["checkpoint_stall_s"] for record in history if "checkpoint_stall_s" in record][1:]


def as_json(recipe: Recipe, stalls: dict[str, list[float]], medians: dict[str, float]) -> dict[str, Any]:
    ratio = medians["async"] / medians["sync"]
    return report.circumstances("checkpoint", recipe) | {"stall_seconds": stalls, "median_seconds": medians, "ratio": ratio}
