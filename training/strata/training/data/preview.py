"""Terminal view of one row of fine-tuning data: documents, counted tokens, positions and the fill of the rows."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection
from strata.training.data.finetuning.prepare import prepare
from strata.training.data.finetuning.rendering import load_tokenizer
from strata.training.data.finetuning.rows import Rows
from strata.training.data.shards import SPLITS
from strata.training.targets import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COUNTED, OTHER, MARK = "bold green", "dim", "cyan"
OPEN, CLOSE = "⟦", "⟧"


def preview(data: DataSection, tokenizer_dir: Path, context: int, row: int, plain: bool) -> None:
    """Prepares the data, unless that is cached, and prints a row of the training split."""
    console = Console(highlight=False, soft_wrap=True)
    with console.status("") as status:
        folder = prepare(data, tokenizer_dir, context, console.print, lambda done, total: status.update(f"{done}/{total} inputs"))
    rows = Rows(folder, "train")
    if row >= len(rows):
        raise UserError(f"There is no row {row}: the training split has {len(rows):,}.", f"Pass a row from 0 to {len(rows) - 1}.")
    coloured = console.is_terminal and not console.no_color and not plain
    _print_row(console, rows, row, load_tokenizer(tokenizer_dir), coloured)
    _print_sets(console, rows)


def _print_row(console: Console, rows: Rows, row: int, tokenizer: "PreTrainedTokenizerFast", coloured: bool) -> None:
    batch = rows.read(np.array([row]))
    assert batch.positions is not None
    tokens, targets, positions = batch.tokens[0], batch.targets[0], batch.positions[0]
    counted = np.append(False, targets[:-1] != IGNORED)  # whether a token is a target, not whether it has one
    lengths, places = rows.lengths(row), rows.places(row)
    starts = np.flatnonzero(positions == 0)
    assert starts[: len(lengths)].tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
    for number, (begin, length, place) in enumerate(zip(starts, lengths, places, strict=False)):
        mine = slice(begin, begin + length)
        title = _title(rows, number, batch.labels[0] if batch.labels else None)
        share = f"{counted[mine].sum():,} of {length:,} tokens count"
        console.print(Text(f"── {title} · positions 0 to {length - 1:,} · {share} · {place}", MARK))
        console.print(_text(tokens[mine].tolist(), counted[mine].tolist(), tokenizer, coloured))
    used = sum(lengths)
    if used < len(tokens):
        console.print(Text(f"── padding · positions 0 to {len(tokens) - used - 1:,} · nothing counts", MARK))
    console.print(
        f"row {row:,} of {len(rows):,}: {used:,} of {len(tokens):,} tokens ({used / len(tokens):.1%} full), "
        f"{counted.sum():,} count ({counted.sum() / used:.1%})"
    )


def _title(rows: Rows, number: int, labels: list[bool] | None) -> str:
    if rows.meta.objective == "pairs":
        return f"pair {number // 2} {'rejected' if number % 2 else 'chosen'}"
    return f"document {number}" + (f" ({'good' if labels[number] else 'bad'})" if labels else "")


def _text(tokens: list[int], counted: list[bool], tokenizer: "PreTrainedTokenizerFast", coloured: bool) -> Text:
    found = Text()
    for counts, text in _spans(tokens, counted, tokenizer):
        if coloured:
            found.append(text, COUNTED if counts else OTHER)
        else:
            found.append(f"{OPEN}{text}{CLOSE}" if counts else text)
    return found


def _spans(tokens: list[int], counted: list[bool], tokenizer: "PreTrainedTokenizerFast") -> Iterator[tuple[bool, str]]:
    """Text of consecutive tokens that all count, or all do not."""
    for counts, group in groupby(zip(counted, tokens, strict=True), key=lambda pair: pair[0]):
        ids = [token for _, token in group]
        yield counts, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _print_sets(console: Console, rows: Rows) -> None:
    table = Table(
        "set", "kind", "split", "examples", "rows", "documents", "tokens", "full", "count", box=None, header_style="bold"
    )
    for one in rows.meta.sets:
        for split in SPLITS:
            counts = one.counts[split]
            numbers = (one.examples[split], counts.rows, counts.documents, counts.tokens)
            shares = (one.fill(split, rows.meta.context), counts.counted / counts.tokens)
            table.add_row(one.title, one.kind, split, *(f"{n:,}" for n in numbers), *(f"{share:.1%}" for share in shares))
    console.print(table)
    for note in rows.meta.notes:
        console.print(note, markup=False)
