"""Tokens before each point of a chain, estimated from the tokens of the rendered prompt.

A template adds text around every message. All of a rendered prompt that is not the messages' text is spread over them evenly, and
the length of each token's string then says which token a position is in.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.serving.routing.kv.prefix_chain import Chain


def token_lengths(tokenizer: Any, vocabulary: int) -> NDArray[np.int32]:
    """Length of each token's string, by id. For byte-level vocabularies these are bytes."""
    words = tokenizer.convert_ids_to_tokens(list(range(min(vocabulary, len(tokenizer)))))
    lengths = np.ones(vocabulary, dtype=np.int32)
    lengths[: len(words)] = [len(word) if isinstance(word, str) and word else 1 for word in words]
    return lengths


def tokens_before(chain: Chain, token_ids: Sequence[int], lengths: NDArray[np.int32]) -> list[int]:
    """Number of tokens before each point. `token_ids` are those of the whole prompt."""
    if not chain.points or not len(token_ids):
        return []
    ends = np.cumsum(lengths[np.minimum(np.asarray(token_ids), len(lengths) - 1)])
    rendered = float(ends[-1])
    positions = np.array([point.position for point in chain.points], dtype=np.float64)
    added = rendered - chain.size
    if chain.messages and added > 0:
        # A point within a text is behind the header of its message; the prompt ends with the header of the answer.
        before = np.array([point.messages for point in chain.points], dtype=np.float64)
        inside = np.array([point.inside for point in chain.points])
        offsets = positions + added / (chain.messages + 0.5) * (before + 0.5 * inside)
    else:
        offsets = positions * (rendered / chain.size)
    return [int(count) for count in np.searchsorted(ends, offsets, side="right")]
