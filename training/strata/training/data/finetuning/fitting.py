"""Documents cut to the length of a row: long examples are dropped or truncated, long texts are split."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strata.platform.recipe import DataKind
from strata.training.data.finetuning.rendered import COUNTED, RenderedInput

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Fitted:
    """Parts [begins, ends) of an input's tokens, and the example of each. `long` are the examples of which a document was
    dropped, and `lengths` their tokens."""

    begins: Indices
    ends: Indices
    examples: Indices
    long: Indices
    lengths: Indices


def fit(rendered: RenderedInput, kind: DataKind, width: int, context: int, on_long: Literal["drop", "truncate"]) -> Fitted:
    """Documents of an input as parts that fit into a row. With `width` 2, every two are a pair that stays in one row."""
    begins, ends = rendered.documents[:-1].copy(), rendered.documents[1:].copy()
    examples = np.repeat(np.arange(len(rendered.numbers)), np.diff(rendered.examples))
    if kind == "text":
        return _split(begins, ends, examples, context)
    lengths = (ends - begins).reshape(-1, width).sum(axis=1)
    fits = lengths <= context
    if on_long == "truncate":
        for unit in np.flatnonzero(~fits).tolist():
            mine = slice(unit * width, (unit + 1) * width)
            ends[mine] = begins[mine] + _shares(ends[mine] - begins[mine], context)
            fits[unit] = all(_counts(rendered, begin, end) for begin, end in zip(begins[mine], ends[mine], strict=True))
    chosen = np.repeat(fits, width)
    long, first = np.unique(examples[::width][~fits], return_index=True)
    return Fitted(begins[chosen], ends[chosen], examples[chosen], long, lengths[~fits][first])


def _split(begins: Indices, ends: Indices, examples: Indices, context: int) -> Fitted:
    """Texts in parts of at most `context` tokens. A part begins with the last token of the one before, so that every token but
    a text's first is a target once."""
    stride = context - 1
    counts = np.maximum(1, -(-(ends - begins - 1) // stride))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a part in its text
    starts = np.repeat(begins, counts) + number * stride
    stops = np.minimum(starts + context, np.repeat(ends, counts))
    none = np.empty(0, np.int64)
    return Fitted(starts, stops, np.repeat(examples, counts), none, none)


def _shares(lengths: Indices, context: int) -> Indices:
    """Tokens for each document of a unit that is too long: all of a short answer, and the rest for the long one."""
    if len(lengths) == 1:
        return np.array([context])
    half, short = context // 2, int(lengths.min())
    return np.minimum(lengths, context - short if short <= half else half)


def _counts(rendered: RenderedInput, begin: int, end: int) -> bool:
    return bool((rendered.read(begin + 1, end) >= COUNTED).any())
