import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from strata.training import bigram
from strata.training.bigram import bigram_loss
from strata.training.shards import read_meta, shard_path
from strata.training.windows import Windows

VOCAB = 512


def test_equals_the_formula_written_plainly(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram, "STRENGTHS", np.array([4.0]))
    train = np.fromfile(shard_path(tokens, "train", 0), read_meta(tokens).dtype).tolist()
    windows = Windows(tokens, "validation", 32)
    losses = []
    for window in windows.read(windows.evenly(3)).tolist():
        for before, after in pairwise(window):
            pair = sum(a == before and b == after for a, b in pairwise(train))
            unigram = (train.count(after) + 1) / (len(train) + VOCAB)
            losses.append(-math.log((pair + 4 * unigram) / (train.count(before) + 4)))
    assert bigram_loss(tokens, 32, 3, VOCAB) == pytest.approx(np.mean(losses), abs=1e-9)


def test_best_smoothing_is_taken(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = bigram_loss(tokens, 32, 5, VOCAB)
    for strength in bigram.STRENGTHS:
        monkeypatch.setattr(bigram, "STRENGTHS", np.array([strength]))
        assert bigram_loss(tokens, 32, 5, VOCAB) >= best
    assert 0 < best < math.log(VOCAB)
