"""Benchmark results as a table, and as JSON with machine, versions, date, recipe and every step's time."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from strata.platform import benchmark_record
from strata.platform.recipe import Recipe
from strata.training.bench.contest import LIGER, Contender, Round
from strata.training.model.flops import flops_per_token, mfu

NAMES: dict[Contender, str] = {
    "ours": "strata train",
    "ours_torch": "strata train, torch's kernels",
    "ours_liger": "strata train, Liger's kernels",
    "bare": "bare torch",
    "liger": "Liger",
    "liger_compiled": "Liger, compiled",
}
FINETUNING_NAMES: dict[Contender, str] = {
    "bare": "transformers",
    "liger": "transformers, Liger",
    "liger_compiled": "transformers, Liger, compiled",
}


@dataclass(frozen=True)
class Outcome:
    """Results of all contenders. `left_out` maps contenders that were not measured to the reason; `peak` is one worker's peak
    in FLOP/s."""

    recipe: Recipe
    warmup: int
    with_ray: bool
    rounds: dict[Contender, list[Round]]
    left_out: dict[Contender, str]
    peak: float | None
    partial: bool = False  # interrupted by the user

    @property
    def flops_per_token(self) -> int:
        return flops_per_token(self.recipe.model, self.recipe.train.lora is not None)

    def tokens_per_s(self, contender: Contender) -> float | None:
        rounds = self.rounds.get(contender)
        return statistics.median(one.tokens_per_s for one in rounds) if rounds else None

    def mfu(self, contender: Contender) -> float | None:
        speed, workers = self.tokens_per_s(contender), self.recipe.parallel.workers
        return None if speed is None else mfu(speed, self.flops_per_token, workers, self.peak)

    def ratio(self, contender: Contender, *to: Contender) -> float | None:
        """Throughput relative to the fastest of `to` that ran."""
        speed, others = self.tokens_per_s(contender), [self.tokens_per_s(other) for other in to]
        known = [other for other in others if other is not None]
        return None if speed is None or not known else speed / max(known)


def table(outcome: Outcome) -> Table:
    """One row per contender, including those that did not run; their reasons are in the caption."""
    reasons = [
        f"{name_of(contender, outcome.with_ray, outcome.recipe)} not run: {reason}"
        for contender, reason in outcome.left_out.items()
    ]
    result = Table(box=None, header_style="bold", caption=Text("\n".join(reasons)) if reasons else None, caption_justify="left")
    result.add_column("training")
    for column in ("tokens/s", "MFU", "peak memory", "final loss", f"÷ {name_of('bare', True, outcome.recipe)}", "÷ Liger"):
        result.add_column(column, justify="right")
    for contender, rounds in outcome.rounds.items():
        memory = rounds[-1].peak_memory_bytes
        result.add_row(
            name_of(contender, outcome.with_ray, outcome.recipe),
            _cell(outcome.tokens_per_s(contender), "{:,.0f}"),
            _cell(outcome.mfu(contender), "{:.1%}"),
            _cell(memory and memory / 2**30, "{:.2f} GiB"),
            _cell(rounds[-1].final_loss, "{:.4f}"),
            _cell(outcome.ratio(contender, "bare"), "{:.2f}"),
            _cell(outcome.ratio(contender, *LIGER), "{:.2f}"),
        )
    for contender in outcome.left_out:
        result.add_row(name_of(contender, outcome.with_ray, outcome.recipe), *6 * "-")
    return result


def as_json(outcome: Outcome) -> dict[str, Any]:
    return circumstances("finetune" if outcome.recipe.model.family else "train", outcome.recipe) | {
        "warmup_steps": outcome.warmup,
        "with_ray": outcome.with_ray,
        "flops_per_token": outcome.flops_per_token,
        "peak_flops_per_worker": outcome.peak,
        "contenders": {
            contender: {
                "name": name_of(contender, outcome.with_ray, outcome.recipe),
                "tokens_per_s": outcome.tokens_per_s(contender),
                "mfu": outcome.mfu(contender),
                "ratio_to_bare": outcome.ratio(contender, "bare"),
                "ratio_to_liger": outcome.ratio(contender, *LIGER),
                "rounds": [asdict(one) for one in rounds],
            }
            for contender, rounds in outcome.rounds.items()
        },
        "left_out": outcome.left_out,
        "partial": outcome.partial,
    }


def circumstances(benchmark: str, recipe: Recipe) -> dict[str, Any]:
    """Benchmark header (date, machine, versions) with the recipe."""
    return {**benchmark_record.header(benchmark), "recipe": recipe.model_dump(mode="json")}


def name_of(contender: Contender, with_ray: bool, recipe: Recipe) -> str:
    if recipe.model.family and contender in FINETUNING_NAMES:
        return FINETUNING_NAMES[contender] + (", peft" if recipe.train.lora else "")
    return NAMES[contender] if with_ray else NAMES[contender].replace("strata train", "strata without Ray")


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
