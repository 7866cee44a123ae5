"""Bigram baseline: the validation loss of a bigram model, on the same windows that the trained model is evaluated on.

p(w | v) = (c(v, w) + k p(w)) / (c(v) + k), with a smoothed unigram p(w). The baseline should be as strong as possible, so k is
the value with the lowest loss on the evaluated windows.

Counts cover the training split, or SAMPLE tokens in chunks spread evenly over it if it is larger: more tokens would hardly
change the result, and counting them would delay the first step by hours. The result is cached next to the tokens.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.platform.files import write_atomic
from strata.training.data.digests import writable
from strata.training.data.shards import read_meta, shard_path
from strata.training.data.windows import Windows

STRENGTHS = 2.0 ** np.arange(-2, 13)
CHUNK = 2**22
SAMPLE = 2**26


def cached_bigram_loss(folder: Path, context: int, eval_sequences: int, vocab: int) -> float:
    """`bigram_loss`, computed once per token folder and set of evaluated windows."""
    record = folder / f"bigram-{context}-{eval_sequences}.json"
    try:
        return float(json.loads(record.read_text())["loss"])
    except (OSError, ValueError, KeyError, TypeError):  # missing or truncated
        loss = bigram_loss(folder, context, eval_sequences, vocab)
    with writable(record):
        write_atomic(record, json.dumps({"loss": loss}))
    return loss


def bigram_loss(folder: Path, context: int, eval_sequences: int, vocab: int) -> float:
    """Loss in nats per token. Counts only pairs that occur in the evaluated windows, so memory does not grow with the training
    split."""
    windows = Windows(folder, "validation", context)
    evaluated = windows.read(windows.evenly(eval_sequences))
    previous, following = evaluated[:, :-1].ravel(), evaluated[:, 1:].ravel()
    pairs, pair_of = np.unique(previous * vocab + following, return_inverse=True)

    pair_counts = np.zeros(len(pairs))
    token_counts = np.zeros(vocab)
    for tokens in _chunks(folder):
        token_counts += np.bincount(tokens, minlength=vocab)
        codes, counts = np.unique(tokens[:-1] * vocab + tokens[1:], return_counts=True)
        place = np.searchsorted(pairs, codes).clip(max=len(pairs) - 1)
        hit = pairs[place] == codes
        pair_counts[place[hit]] += counts[hit]

    unigram = (token_counts + 1) / (token_counts.sum() + vocab)
    seen, before, alone = pair_counts[pair_of], token_counts[previous], unigram[following]
    return min(float(-np.log((seen + k * alone) / (before + k)).mean()) for k in STRENGTHS)


def _chunks(folder: Path) -> Iterator[NDArray[np.int64]]:
    meta = read_meta(folder)
    places = [(number, at) for number, count in enumerate(meta.shards["train"]) for at in range(0, count, CHUNK)]
    for place in np.unique(np.linspace(0, len(places) - 1, min(len(places), SAMPLE // CHUNK), dtype=np.int64)):
        number, at = places[place]
        shard = np.memmap(shard_path(folder, "train", number), meta.dtype, "r")
        yield shard[at : at + CHUNK].astype(np.int64)
