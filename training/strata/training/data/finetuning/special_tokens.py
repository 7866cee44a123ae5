"""Special tokens of a chat template whose embeddings were never trained.

A base model has embeddings for the tokens of a chat template, but has not seen them: their rows are zero, or still equal to one
another as they were initialized. A model that is then trained with a frozen embedding cannot tell its turns apart.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.platform.errors import UserError

ZERO = 1e-16  # largest element of a row that was never updated; some models have rows of about 1e-23


def untrained_special_tokens(ids: Sequence[int], row: Callable[[int], NDArray[Any]]) -> list[int]:
    """Ids whose embedding row, given by `row`, is zero or equal to the row of another of the ids."""
    rows = {token: np.ascontiguousarray(row(token)) for token in dict.fromkeys(ids)}
    copies: dict[bytes, list[int]] = {}
    for token, values in rows.items():
        copies.setdefault(values.tobytes(), []).append(token)
    equal = {token for same in copies.values() if len(same) > 1 for token in same}
    return [token for token, values in rows.items() if token in equal or np.abs(values).max(initial=0) <= ZERO]


def require_trained(tokens: Mapping[int, tuple[str, str]], row: Callable[[int], NDArray[Any]]) -> None:
    """Refuses data that uses untrained special tokens. `tokens` maps each id to its name and the first example with it."""
    if untrained := untrained_special_tokens(list(tokens), row):
        named = ", ".join(tokens[token][0] for token in untrained)
        place = tokens[untrained[0]][1]
        raise UserError(
            f"The model has no trained embedding of special tokens that the data uses: {named} (first in {place}).",
            "Train the embeddings too, start from a chat model, or set data.chat_template to a template without these tokens.",
        )
