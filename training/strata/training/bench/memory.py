"""Compares the planner's memory prediction for training on this machine's CPUs with measured process memory.

The baseline is a run of a tiny model in the same layout: a process with all its libraries loaded. It can vary by a fifth,
depending on whether the kernel has large pages to hand out. All ranks of these layouts are alike, so the peak of rank 0, which
is in its records, stands for all of them.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strata.planner.recipes import planned_peak
from strata.platform import benchmark_record, recipe_file
from strata.platform.files import cache_dir
from strata.platform.recipe import DataSection, ModelSection, Recipe
from strata.training.bench import launch
from strata.training.bench.contest import Job, shortened
from strata.training.data import shards
from strata.training.data.corpus import open_corpus

BAR = 0.10
STEPS = 6  # the heap stops growing by the fourth or fifth
LAYOUTS = {
    "data 2, ZeRO 0": ("parallel.zero=0",),
    "data 2, ZeRO 2": ("parallel.zero=2",),
    "tensor 2, ZeRO 0": ("parallel.zero=0", "parallel.tensor=2"),
}
# State and activations of hundreds of megabytes each, at a few seconds per step.
MODEL = ModelSection(layers=4, hidden=768, heads=12, kv_heads=4, ffn=2048, vocab=4096, context=256)
TINY_MODEL = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=MODEL.vocab, context=16)
SETTINGS = ("train.batch=16", "train.micro_batch=4", "parallel.workers=2", "parallel.device=cpu", "parallel.cpus_per_worker=1")


@dataclass(frozen=True)
class Row:
    """Bytes of one worker above the baseline."""

    layout: str
    planned: float
    measured: float
    baseline: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return {**benchmark_record.header("memory"), "bar": BAR, "layouts": [asdict(row) | {"error": row.error} for row in rows]}


def compare(data: DataSection | None = None, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measures every layout. `data` defaults to the standard library's source. `say` receives progress messages."""
    data = data or DataSection()
    say("reading the corpus")
    tokens = shards.prepare(open_corpus(data), MODEL.vocab, data.holdout)
    recipes = {name: recipe_file.load(recipe_file.DEFAULT, (*SETTINGS, *overrides)) for name, overrides in LAYOUTS.items()}
    rows = []
    for name, recipe in recipes.items():
        say(f"{name}: baseline with a tiny model")
        baseline = _peak(recipe, TINY_MODEL, tokens)
        say(f"{name}: {STEPS} steps")
        peak = _peak(recipe, MODEL, tokens)
        rows.append(Row(name, planned_peak(recipe.model_copy(update={"model": MODEL})), peak - baseline, baseline))
    return rows


def _peak(recipe: Recipe, model: ModelSection, tokens: Path) -> int:
    """Peak memory of rank 0's process in bytes."""
    work = cache_dir() / "bench"
    work.mkdir(parents=True, exist_ok=True)
    short = shortened(recipe.model_copy(update={"model": model}), STEPS)
    with tempfile.TemporaryDirectory(dir=work, prefix=".memory-") as folder:
        job = Job(contender="ours", recipe=short, tokens=tokens, folder=Path(folder))
        return launch.run(job, False, work, lambda _: None)[-1]["peak_memory_bytes"]
