"""Table of a check, and the error for an export that differs from transformers."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from strata.platform.errors import UserError
from strata.training.deployment.check import Comparison

SHOWN = 3  # disagreements
UNITS = ("B", "KB", "MB", "GB", "TB")


def show(console: Console, runtime: str, comparison: Comparison, size: int) -> None:
    table = Table("", runtime, "transformers", box=None, header_style="bold")
    table.add_row("prompts", str(comparison.prompts), "")
    table.add_row("tokens equal", f"{comparison.equal} of {comparison.tokens}", "")
    table.add_row("ties", str(len(comparison.ties)), "")
    table.add_row("largest logit difference", f"{comparison.largest_difference:.2g}", "")
    table.add_row("size", readable(size), "")
    speeds = [f"{comparison.tokens / seconds:.0f}" for seconds in (comparison.seconds, comparison.reference_seconds)]
    table.add_row("tokens/s", *speeds)
    console.print(table)
    for tie in comparison.ties[:SHOWN]:
        console.print(f"tie: {tie}")


def require_equal(runtime: str, comparison: Comparison) -> None:
    if not comparison.differences:
        return
    number = len(comparison.differences)
    cause = f"{runtime} differs from transformers at {number} of {comparison.tokens} tokens: {comparison.differences[0]}."
    fix = "Nothing was written. Try --dtype float32, or report it with the model's config.json."
    raise UserError(cause, fix)


def size_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def readable(size: float) -> str:
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {UNITS[-1]}"
