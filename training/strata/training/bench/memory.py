"""What the planner says our training holds on this machine's CPUs, beside what its processes come to hold.

The baseline is a run of next to no model in the same layout: a process with all its libraries at work. On some days it scatters
by a fifth, as the kernel has large pages to give or not. Ranks of these layouts are alike, so that the first one's peak, which
its records carry, stands for all.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strata.planner.memory.activations import OWN_ON_CPU
from strata.planner.memory.plan import peak_bytes
from strata.planner.recipes import from_recipe
from strata.platform import benchmark_record, recipe_file
from strata.platform.files import cache_dir
from strata.platform.recipe import DataSection, ModelSection, Recipe
from strata.training.bench import launch
from strata.training.bench.contest import Job, shortened
from strata.training.data import shards
from strata.training.data.corpus import open_corpus

BAR = 0.10
STEPS = 6  # by the fourth or fifth the heap grows no more
LAYOUTS = {
    "data 2, ZeRO 0": ("parallel.zero=0",),
    "data 2, ZeRO 2": ("parallel.zero=2",),
    "tensor 2, ZeRO 0": ("parallel.zero=0", "parallel.tensor=2"),
}
# State and activations of hundreds of megabytes each, in a few seconds a step.
MODEL = ModelSection(layers=4, hidden=768, heads=12, kv_heads=4, ffn=2048, vocab=4096, context=256)
NEXT_TO_NOTHING = ModelSection(layers=1, hidden=16, heads=2, kv_heads=2, ffn=16, vocab=MODEL.vocab, context=16)
SETTINGS = ("train.batch=16", "train.micro_batch=4", "parallel.workers=2", "parallel.device=cpu", "parallel.cpus_per_worker=1")


@dataclass(frozen=True)
class Row:
    """Bytes of one worker, without the baseline's."""

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
    """`data`: a corpus, by default the standard library's source. `say` is told what is being run."""
    data = data or DataSection()
    say("reading the corpus")
    tokens = shards.prepare(open_corpus(data), MODEL.vocab, data.holdout)
    recipes = {name: recipe_file.load(recipe_file.DEFAULT, (*SETTINGS, *overrides)) for name, overrides in LAYOUTS.items()}
    rows = []
    for name, recipe in recipes.items():
        say(f"{name}: next to no model, for a baseline")
        baseline = _peak(recipe, NEXT_TO_NOTHING, tokens)
        say(f"{name}: {STEPS} steps")
        shape, layout, sequence = from_recipe(recipe.model_copy(update={"model": MODEL}))
        peak = _peak(recipe, MODEL, tokens)
        rows.append(Row(name, peak_bytes(shape, layout, OWN_ON_CPU, sequence), peak - baseline, baseline))
    return rows


def _peak(recipe: Recipe, model: ModelSection, tokens: Path) -> int:
    """Of the first worker's process, in bytes."""
    work = cache_dir() / "bench"
    work.mkdir(parents=True, exist_ok=True)
    short = shortened(recipe.model_copy(update={"model": model}), STEPS)
    with tempfile.TemporaryDirectory(dir=work, prefix=".memory-") as folder:
        job = Job(contender="ours", recipe=short, tokens=tokens, folder=Path(folder))
        return launch.run(job, False, work, lambda _: None)[-1]["peak_memory_bytes"]
