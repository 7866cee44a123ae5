"""The loss to beat: a bigram model of the same tokens, on the very windows that the trained model is evaluated on.

p(w | v) = (c(v, w) + k p(w)) / (c(v) + k), with the unigram p(w) itself smoothed. The baseline should be as strong as it
can be, so k is the one that suits the evaluated windows best: no choice of ours can flatter the trained model.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata.training.shards import read_meta, shard_path
from strata.training.windows import Windows

STRENGTHS = 2.0 ** np.arange(-2, 13)
CHUNK = 2**22


def bigram_loss(folder: Path, context: int, eval_sequences: int, vocab: int) -> float:
    """Nats per token. Counts are kept only for pairs that are asked about, so the training split may be of any size."""
    windows = Windows(folder, "validation", context)
    asked = windows.read(windows.evenly(eval_sequences))
    previous, following = asked[:, :-1].ravel(), asked[:, 1:].ravel()
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
    for number, count in enumerate(meta.shards["train"]):
        if count == 0:
            continue
        shard = np.memmap(shard_path(folder, "train", number), meta.dtype, "r")
        for begin in range(0, count, CHUNK):
            yield shard[begin : begin + CHUNK].astype(np.int64)
