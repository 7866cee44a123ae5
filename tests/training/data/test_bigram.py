import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from strata.training.data import bigram
from strata.training.data.bigram import bigram_loss, cached_bigram_loss
from strata.training.data.shards import read_meta, shard_path
from strata.training.data.windows import Windows

VOCAB = 512


def test_loss_equals_the_formula(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_best_smoothing_is_used(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = bigram_loss(tokens, 32, 5, VOCAB)
    for strength in bigram.STRENGTHS:
        monkeypatch.setattr(bigram, "STRENGTHS", np.array([strength]))
        assert bigram_loss(tokens, 32, 5, VOCAB) >= best
    assert 0 < best < math.log(VOCAB)


def test_large_corpora_are_sampled_evenly(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram, "CHUNK", 50)
    monkeypatch.setattr(bigram, "SAMPLE", 500)
    train = np.fromfile(shard_path(tokens, "train", 0), read_meta(tokens).dtype).tolist()
    chunks = [chunk.tolist() for chunk in bigram._chunks(tokens)]
    assert len(chunks) == 10 and len(train) > 1000
    assert chunks[0] == train[:50] and chunks[-1] == train[len(train) // 50 * 50 :]
    assert 0 < bigram_loss(tokens, 32, 5, VOCAB) < math.log(VOCAB) + 1


def test_loss_is_computed_once(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached_bigram_loss(tokens, 32, 5, VOCAB)
    assert first == bigram_loss(tokens, 32, 5, VOCAB)
    other = cached_bigram_loss(tokens, 16, 5, VOCAB)
    assert other == bigram_loss(tokens, 16, 5, VOCAB) != first
    monkeypatch.setattr(bigram, "_chunks", lambda _: pytest.fail("the tokens were counted again"))
    assert cached_bigram_loss(tokens, 32, 5, VOCAB) == first
