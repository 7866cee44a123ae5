"""The loss to beat: a bigram model of the same tokens, on the very windows that the trained model is evaluated on.

p(w | v) = (c(v, w) + k p(w)) / (c(v) + k), with the unigram p(w) itself smoothed. The baseline should be as strong as it
can be, so k is the one that suits the evaluated windows best: no choice of ours can flatter the trained model.

The counts are of the whole training split or, where it is larger, of SAMPLE tokens in chunks spread evenly over it: more would
hardly change them, and hours would pass before the first step. The result is kept beside the tokens.
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


def kept_bigram_loss(folder: Path, context: int, eval_sequences: int, vocab: int) -> float:
    """`bigram_loss`, computed once for a folder of tokens and the windows evaluated."""
    record = folder / f"bigram-{context}-{eval_sequences}.json"
    try:
        return float(json.loads(record.read_text())["loss"])
    except (OSError, ValueError, KeyError, TypeError):  # not there, or cut short: it is made again
        loss = bigram_loss(folder, context, eval_sequences, vocab)
    with writable(record):
        write_atomic(record, json.dumps({"loss": loss}))
    return loss


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
    places = [(number, at) for number, count in enumerate(meta.shards["train"]) for at in range(0, count, CHUNK)]
    for place in np.unique(np.linspace(0, len(places) - 1, min(len(places), SAMPLE // CHUNK), dtype=np.int64)):
        number, at = places[place]
        shard = np.memmap(shard_path(folder, "train", number), meta.dtype, "r")
        yield shard[at : at + CHUNK].astype(np.int64)
