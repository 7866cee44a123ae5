"""Model card of an export: `README.md` with Hugging Face's YAML header.

The card depends on the run alone, not on the time or the machine, so that an export can be repeated byte by byte.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from strata.platform.files import cache_dir, write_atomic
from strata.platform.recipe import DataSetSection, LoraSection, Recipe
from strata.platform.runs import Run
from strata.training.data import shards
from strata.training.data.finetuning import store
from strata.training.metrics import evaluations, records
from strata.training.metrics.records import Record, perplexity

NAME = "README.md"
LOSS_ROWS = 10
# Keys of the train section that change neither the model nor its losses, or name places on this machine.
LEFT_OUT = {
    *("checkpoints", "checkpoint_every", "checkpoint_upload", "keep", "keep_best", "max_failures", "trackers", "time_budget_s"),
    *("eval_every", "samples", "compile", "kernels", "recompute"),
    "distill",  # a path, whose name is in the introduction
}


@dataclass(frozen=True)
class Origin:
    """Checkpoint behind an export: its step, and the digest of its data, which names a folder of the cache."""

    step: int
    corpus: str


def write(folder: Path, run: Run, origin: Origin) -> None:
    """Writes the card into an export of a run."""
    recipe = run.recipe()
    history = [record for record in records.read(run.metrics) if record["step"] <= origin.step]
    parts = [
        f"---\n{yaml.safe_dump(_header(folder, recipe, origin), sort_keys=False)}---",
        f"# {run.name}",
        _introduction(recipe),
        "## Model",
        _model(folder, recipe),
        "## Data",
        _data(recipe, origin),
        "## Recipe",
        _recipe(recipe),
        "## Losses",
        _losses(history, recipe),
        "## Evaluations",
        _evaluations(run),
        "## Use",
        _use(run),
    ]
    write_atomic(folder / NAME, "\n\n".join(parts) + "\n")


def origin_of(folder: Path) -> Origin | None:
    """The origin in the header of an export's card. None for a folder without a card, or with that of another program."""
    try:
        _, header, _ = (folder / NAME).read_text().split("---\n", 2)
        found = yaml.safe_load(header)["strata"]
        return Origin(int(found["step"]), str(found["corpus"]))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None


def _header(folder: Path, recipe: Recipe, origin: Origin) -> dict[str, Any]:
    base = _hub_id(recipe.model.source)
    datasets = list(dict.fromkeys(one.hf for one in recipe.data.all_sets if one.hf))
    return {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base else {}),
        **({"datasets": datasets} if datasets else {}),
        "tags": ["strata", _config(folder)["model_type"]],
        "strata": {"step": origin.step, "corpus": origin.corpus},
    }


def _introduction(recipe: Recipe) -> str:
    lora, preference = recipe.train.lora, recipe.train.preference
    how = f" with adapters of rank {lora.rank} ({_kind(lora)}), merged into the weights," if lora else ""
    how += f" by preference optimization ({preference.loss})" if preference else ""
    how += f" by distillation of {_start(recipe.train.distill)}" if recipe.train.distill else ""
    return f"A language model trained from {_start(recipe.model.source)}{how} with Strata."


def _kind(lora: LoraSection) -> str:
    return ("Q" if lora.base == "nf4" else "") + ("DoRA" if lora.dora else "LoRA")


def _start(source: str | None) -> str:
    """Weights at the start of the training. Of a folder on this machine only its name, or that of its run."""
    if source is None:
        return "random weights"
    folder = Path(source)
    return _hub_id(source) or f"`{folder.parent.name if folder.name == 'export' else folder.name}`"


def _model(folder: Path, recipe: Recipe) -> str:
    model, config = recipe.model, _config(folder)
    rows: list[tuple[str, object]] = [
        ("architecture", config["architectures"][0]),
        ("parameters", f"{_parameters(folder):,}"),
        ("dtype", config.get("dtype", "float32")),
        ("layers", model.layers),
        ("hidden size", model.hidden),
        ("attention heads", f"{model.heads}, with {model.kv_heads} for keys and values"),
        ("feed-forward size", model.ffn),
        ("vocabulary", model.vocab),
        ("context", f"{model.context} tokens"),
    ]
    if model.moe:
        rows.insert(-2, ("experts", f"{model.moe.experts}, {model.moe.top_k} for each token"))
    return _table(("", ""), rows)


def _parameters(folder: Path) -> int:
    """Stored parameters, from the headers of the weight files."""
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  (no mapping)
    return total


def _data(recipe: Recipe, origin: Origin) -> str:
    rows: list[tuple[str, object]] = [("source", _source(one, recipe)) for one in recipe.data.all_sets]
    tokens = _corpus_tokens(recipe, origin)
    if tokens:
        rows.append(("corpus", f"{tokens['train']:,} tokens, and {tokens['validation']:,} held out for validation"))
    batch, context = recipe.train.batch, recipe.model.context
    seen = f"{origin.step:,} steps of {batch} sequences of {'up to ' if recipe.model.family else ''}{context} tokens"
    default = [] if rows[:1] and rows[0][0] == "source" else [("source", "source code of the Python standard library")]
    return _table(("", ""), [*default, *rows, ("trained on", seen)])


def _corpus_tokens(recipe: Recipe, origin: Origin) -> dict[str, int] | None:
    """Tokens of each split, None if the cache was emptied."""
    try:
        if recipe.model.family is None:
            return shards.read_meta(cache_dir() / "tokens" / origin.corpus).tokens
        sets = store.read_meta(cache_dir() / "rows" / origin.corpus).sets
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return {split: sum(one.counts[split].tokens for one in sets) for split in shards.SPLITS}


def _source(one: DataSetSection, recipe: Recipe) -> str:
    """Name of a set with its kind and its share of the rows. A path or an address could be private."""
    named = f"{one.hf}{f' ({one.hf_config})' if one.hf_config else ''}, split {one.hf_split}" if one.hf else f"`{one.title}`"
    kind = "" if one.kind == "text" else f", {one.kind}"
    weights = sum(each.weight for each in recipe.data.all_sets)
    share = f", {one.weight / weights:.0%}" if len(recipe.data.all_sets) > 1 else ""
    return f"{named}{kind}{share}"


def _recipe(recipe: Recipe) -> str:
    """Keys that differ from their defaults."""
    private: dict[str, Any] = dict.fromkeys(LEFT_OUT, True) | {"lora": {"source"}}
    train = recipe.train.model_dump(mode="json", exclude_defaults=True, exclude=private)
    parallel = recipe.parallel.model_dump(mode="json", exclude_defaults=True)
    chosen = {"train": train} | ({"parallel": parallel} if parallel else {})
    return f"```yaml\n{yaml.safe_dump(chosen, sort_keys=False)}```"


def _losses(history: Sequence[Record], recipe: Recipe) -> str:
    if not history:
        return "The run has no records."
    evaluated = [record for record in history if "val_loss" in record]
    rows: list[tuple[object, ...]] = [
        ("first", history[0]["step"], f"{history[0]['loss']:.4f}", "", ""),
        *(("", *_row(record)) for record in _spread(evaluated)),
        ("final", *_row(history[-1])),
    ]
    if evaluated:
        rows.append(("best validation", *_row(min(evaluated, key=lambda record: record["val_loss"]))))
    preference = recipe.train.preference
    unit = f"Losses of preference optimization ({preference.loss})." if preference else "Nats per token."
    unit += " The training loss is the cross entropy with the teacher's distribution." if recipe.train.distill else ""
    return f"{unit}\n\n" + _table(("", "step", "training loss", "validation loss", "perplexity"), rows)


def _row(record: Record) -> tuple[object, ...]:
    validation = f"{record['val_loss']:.4f}" if "val_loss" in record else ""
    found = perplexity(record)
    return record["step"], f"{record['loss']:.4f}", validation, "" if found is None else f"{found:.4g}"


def _spread(history: Sequence[Record]) -> list[Record]:
    """At most LOSS_ROWS records at even distances, without the last, which has its own row."""
    rest = history[:-1]
    return [rest[number * len(rest) // LOSS_ROWS] for number in range(LOSS_ROWS)] if len(rest) > LOSS_ROWS else list(rest)


def _evaluations(run: Run) -> str:
    found = evaluations.newest(evaluations.read_all(run))
    if not found:
        return f"None yet: `strata eval {run.name}` adds them."
    rows = [
        (
            task,
            metric,
            f"{score.value:.4f}" + (f" ± {score.stderr:.4f}" if score.stderr is not None else ""),
            "" if score.shots is None else score.shots,
            score.samples,
            "" if evaluation.step is None else evaluation.step,
        )
        for (task, metric), (evaluation, score) in sorted(found.items())
    ]
    return "By lm-evaluation-harness.\n\n" + _table(("task", "metric", "value", "shots", "samples", "step"), rows)


def _use(run: Run) -> str:
    return (
        f"An OpenAI-compatible endpoint, from the run or from a copy of this folder:\n\n"
        f"```bash\nstrata serve --run {run.name}\nstrata serve --model FOLDER\n```\n\n"
        "transformers and vLLM load the folder too."
    )


def _hub_id(source: str | None) -> str | None:
    """The source if it is an id on Hugging Face's hub. A run's recipe has other sources as absolute paths."""
    return None if source is None or Path(source).is_absolute() else source


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
