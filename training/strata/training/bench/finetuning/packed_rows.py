"""Rows of packed conversations with random tokens: the speed of fine-tuning depends on their lengths and masks alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from strata.training.data.finetuning import store
from strata.training.data.finetuning.packing import pack
from strata.training.data.finetuning.rendered import COUNTED, UNLABELED
from strata.training.data.shards import SPLITS

SPREAD = 0.9  # standard deviation of the lengths' logarithm, about that of public sets of conversations
VALIDATION_ROWS = 2


def write(folder: Path, rows: int, context: int, vocab: int, length: int, share: float) -> None:
    """Writes at least `rows` rows of documents with a median of `length` tokens, of which the last `share` counts,
    into an empty folder."""
    random = np.random.default_rng(0)
    counts = {}
    for split in SPLITS:
        wanted = (rows if split == "train" else VALIDATION_ROWS) * context
        lengths = _lengths(random, wanted, context, length)
        ends = np.cumsum(lengths)
        tokens = random.integers(2, vocab, ends[-1], dtype=np.uint32)
        for end, size in zip(ends.tolist(), lengths.tolist(), strict=True):
            tokens[end - max(1, round(size * share)) : end] |= COUNTED
        order, offsets = pack(lengths, context)
        documents = np.arange(len(lengths), dtype=np.int64)
        plan = store.PlannedRows(order, offsets, 1, np.zeros_like(documents), ends - lengths, ends, documents)
        [counts[split]] = store.write_rows(folder, split, [plan], [_input(tokens, len(lengths))], "uint32")
    examples: dict[str, int] = {split: one.documents for split, one in counts.items()}
    sizes = store.SetMeta("random", "chat", examples, counts)
    store.write_meta(folder, store.Meta(context, "uint32", 0, "tokens", [sizes], [["random tokens", "document"]], [], []))


def _lengths(random: np.random.Generator, tokens: int, context: int, length: int) -> Any:
    """Log-normal lengths with `tokens` tokens in total, at least 8 each, and at most a row."""
    drawn = random.lognormal(np.log(length), SPREAD, tokens // 8 + 1).clip(8, context).astype(np.int64)
    return drawn[: int(np.searchsorted(np.cumsum(drawn), tokens)) + 1]


def _input(tokens: Any, documents: int) -> Any:
    """The part of a rendered input that rows are written from."""
    return SimpleNamespace(
        read=lambda begin, end: tokens[begin:end],
        labels=np.full(documents, UNLABELED, np.int8),
        numbers=np.arange(documents, dtype=np.int64),
    )
