import json
import math
from collections import Counter
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


def write(folder: Path, train: list[list[int]], validation: list[int]) -> Path:
    for split, parts in (("train", train), ("validation", [validation])):
        for number, part in enumerate(parts):
            shard_path(folder, split, number).write_bytes(np.array(part, "uint16").tobytes())
    counts = {"train": [len(part) for part in train], "validation": [len(validation)]}
    meta = {"dtype": "uint16", "documents": {}, "shards": counts, "digest": "", "notes": []}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def expected_loss(chunks: list[list[int]], pairs: list[tuple[int, int]], vocab: int) -> float:
    """Lowest mean loss over the strengths 1/4, 1/2, ... 4096. Pairs across two chunks do not count."""
    tokens = Counter(token for chunk in chunks for token in chunk)
    counts = Counter(pair for chunk in chunks for pair in pairwise(chunk))
    total = sum(tokens.values())
    means = []
    for exponent in range(-2, 13):
        k = 2.0**exponent
        losses = [-math.log((counts[v, w] + k * (tokens[w] + 1) / (total + vocab)) / (tokens[v] + k)) for v, w in pairs]
        means.append(sum(losses) / len(losses))
    return min(means)


@pytest.mark.parametrize(
    ("train", "validation"),
    [
        ([[0, 1] * 50], [0, 1, 0, 1, 0]),  # predictable: the weakest smoothing is best
        ([[0, 1] * 500 + [0, 0, 1, 1]], [1, 1, 0, 0, 1]),  # misleading: the strongest is best
        ([[0, 1, 2, 3, 1, 2], [5, 6, 5, 1], [2, 0]], [0, 1, 2, 5, 6]),  # several shards; tokens beyond the evaluated pairs
    ],
)
def test_loss_of_a_small_corpus(tmp_path: Path, train: list[list[int]], validation: list[int]) -> None:
    folder = write(tmp_path, train, validation)
    assert bigram_loss(folder, 4, 1, 7) == pytest.approx(expected_loss(train, list(pairwise(validation)), 7), rel=1e-12)


@pytest.mark.parametrize(
    ("sample", "places"),
    [(12, [(0, 0), (0, 8), (2, 4)]), (15, [(0, 0), (0, 8), (2, 4)]), (24, None), (400, None)],
)
def test_chunks_are_spread_over_all_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int, places: list[tuple[int, int]] | None
) -> None:
    """Shards of 10, 3 and 5 tokens have six chunks of up to 4 tokens. A sample of 12 tokens has three of them."""
    train = [[*range(10)], [*range(20, 23)], [*range(30, 35)]]
    every = [(0, 0), (0, 4), (0, 8), (1, 0), (2, 0), (2, 4)]
    monkeypatch.setattr(bigram, "CHUNK", 4)
    monkeypatch.setattr(bigram, "SAMPLE", sample)
    chunks = [chunk.tolist() for chunk in bigram._chunks(write(tmp_path, train, []))]
    assert chunks == [train[number][at : at + 4] for number, at in places or every]


def test_sample_is_64_mi_tokens_in_16_chunks() -> None:
    assert bigram.SAMPLE == 64 * 1024 * 1024 == 16 * bigram.CHUNK


def test_damaged_record_is_computed_again(tokens: Path) -> None:
    loss = cached_bigram_loss(tokens, 32, 5, VOCAB)
    record = tokens / "bigram-32-5.json"
    for damaged in ('{"los', "[]", '{"other": 1}', '{"loss": null}'):
        record.write_text(damaged)
        assert cached_bigram_loss(tokens, 32, 5, VOCAB) == loss
        assert json.loads(record.read_text()) == {"loss": loss}
