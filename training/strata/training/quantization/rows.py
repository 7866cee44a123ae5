"""Rows of tokens for calibration and for the comparison: of a run's own data, or of a file."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from strata.platform.errors import UserError, shown
from strata.platform.recipe import DataSection
from strata.platform.runs import Run
from strata.training.checkpoint import pretrained
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.data.finetuning import prepare as finetuning
from strata.training.data.finetuning.rows import Rows
from strata.training.data.windows import Windows

LONGEST = 2048  # tokens of a row
HELD_OUT = 64  # rows of the comparison
TAIL = 10  # a file's last tenth is held out
READ = 4  # times the tokens that are used; the rest of a longer file is not read

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class TokenRows:
    """`calibration` and `held_out` are [rows, width + 1]: each token but the first is the target of the one before it."""

    calibration: Tokens
    held_out: Tokens
    origin: str  # for people


def of_run(run: Run, context: int, samples: int, seed: int, console: Console) -> TokenRows:
    """Training rows for calibration, and validation rows that training did not see."""
    recipe = run.recipe()
    width = min(context, LONGEST)
    if recipe.model.family is None:
        folder = shards.prepare(open_corpus(recipe.data), recipe.model.vocab, recipe.data.holdout, console.print)
        train, validation = (Windows(folder, split, width) for split in shards.SPLITS)
        if min(len(train), len(validation)) == 0:
            raise _too_small(f"the data of run '{run.name}'", width)
        chosen = train.read(_draw(len(train), samples, seed))
        return TokenRows(chosen, validation.read(validation.evenly(HELD_OUT)), f"data of run {run.name}")
    folder = finetuning.prepare(recipe.data, run.path / pretrained.BASE, recipe.model.context, console.print)
    calibration, held_out = (
        _windows(_documents(Rows(folder, split), limit * width), width)
        for split, limit in zip(shards.SPLITS, (READ * samples, HELD_OUT + 1), strict=True)
    )
    if min(len(calibration), len(held_out)) == 0:
        raise _too_small(f"the data of run '{run.name}'", width)
    return TokenRows(calibration[_draw(len(calibration), samples, seed)], held_out[:HELD_OUT], f"data of run {run.name}")


def of_file(file: Path, tokenizer: Any, context: int, samples: int, seed: int) -> TokenRows:
    """The first nine tenths of a text, JSONL or Parquet file for calibration, the last one held out."""
    width = min(context, LONGEST)
    if not file.is_file():
        raise UserError(f"--data {shown(file, 200)} is not a file.", "Name a text, JSONL or Parquet file.")
    corpus = open_corpus(DataSection(path=file))
    tokens = _until(_encoded(tokenizer, corpus.documents()), READ * (samples + HELD_OUT) * width)
    tail = max(len(tokens) // TAIL, width + 1)
    train, validation = _windows([tokens[:-tail]], width), _windows([tokens[-tail:]], width)
    if min(len(train), len(validation)) == 0:
        raise _too_small(f"--data {file}", width)
    return TokenRows(train[_draw(len(train), samples, seed)], validation[:HELD_OUT], file.name)


def _encoded(tokenizer: Any, documents: Iterable[str]) -> Iterator[Tokens]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in documents:
        yield np.asarray([*tokenizer(text, add_special_tokens=False, verbose=False).input_ids, *end], np.int64)


def _documents(rows: Rows, most: int) -> list[Tokens]:
    """Tokens of fine-tuning rows without their padding."""
    return [_until((rows.content(index)[0] for index in range(len(rows))), most)]


def _until(parts: Iterable[Tokens], most: int) -> Tokens:
    found: list[Tokens] = []
    count = 0
    for part in parts:
        found.append(part)
        count += len(part)
        if count >= most:
            break
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _windows(parts: Iterable[Tokens], width: int) -> Tokens:
    """[windows, width + 1]; neighbours share a token, as target and as input."""
    cut = ((part[at : at + width + 1] for at in range(0, len(part) - width, width)) for part in parts)
    found = list(chain.from_iterable(cut))
    return np.stack(found) if found else np.empty((0, width + 1), np.int64)


def _draw(available: int, wanted: int, seed: int) -> Tokens:
    chosen = np.random.default_rng(seed).choice(available, min(available, wanted), replace=False)
    return np.sort(chosen).astype(np.int64)


def _too_small(what: str, width: int) -> UserError:
    return UserError(f"{what[0].upper()}{what[1:]} has too little text for rows of {width} tokens.", "Use more text with --data.")
