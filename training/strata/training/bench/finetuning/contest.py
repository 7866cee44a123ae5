"""Fine-tuning benchmark: a model and rows to train on, made if they are not there, and the contest on them."""

import hashlib
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from strata.planner.catalogue import library
from strata.platform import recipe_file
from strata.platform.files import cache_dir
from strata.training.bench import compare, report
from strata.training.bench.finetuning import packed_rows, random_model
from strata.training.data.cached_folder import all_files, build_once


@dataclass(frozen=True)
class Conversations:
    """Median length in tokens, and the share of each that counts in the loss."""

    length: int
    share: float


def bench(
    recipe: str,
    overrides: list[str],
    model: str,
    conversations: Conversations,
    settings: compare.Settings,
    path: Path | None,
) -> report.Outcome:
    """Runs the benchmark, prints a table and writes JSON to `path`, by default in the cache folder."""
    compare.require_measured_steps(settings)
    console = Console(highlight=False, soft_wrap=True)
    with console.status(f"making a model of random weights: {model}"):
        folder = Path(model) if (Path(model) / "config.json").is_file() else _random_model(model)
    chosen = recipe_file.load(recipe, [*overrides, f"model.from={folder}"])
    with console.status("making rows"):
        rows = _rows(chosen.model.context, chosen.model.vocab, settings.steps * chosen.train.batch, conversations, console)
    target = path or cache_dir() / "bench" / "finetune.json"
    return compare.contest_on(rows, (1.0,), chosen, settings, target, console)


def _random_model(name: str) -> Path:
    shape = library.model(name)
    folder = cache_dir() / "bench" / "models" / shape.name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
            random_model.write(Path(making) / shape.name, shape)
            with suppress(OSError):  # another command has just made the same model
                (Path(making) / shape.name).rename(folder)
    return folder


def _rows(context: int, vocab: int, count: int, conversations: Conversations, console: Console) -> Path:
    key = f"{context} {vocab} {count} {conversations}"
    folder = cache_dir() / "bench" / "rows" / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()

    def write(place: Path) -> None:
        packed_rows.write(place, count, context, vocab, conversations.length, conversations.share)

    build_once(folder, write, all_files, "rows", console.print)
    return folder
