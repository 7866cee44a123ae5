"""Training and validation split, and the writer of shards, with chosen hashes and small limits."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strata.platform.errors import UserError
from strata.training.data import readers, shards
from strata.training.data.corpus import Corpus

HASHES = {"aaa": 0.1, "bbbbb": 0.3, "cc": 0.2, "dddddddd": 0.9}


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_hash", HASHES.__getitem__)


@pytest.mark.parametrize(
    ("texts", "holdout", "limit", "share"),
    [
        (["aaa", "bbbbb", "cc", "dddddddd"], 0.25, 0.25, 5 / 18),
        (["aaa", "bbbbb", "cc", "dddddddd"], 0.2, 0.2, 5 / 18),  # up to the limit
        (["aaa", "bbbbb", "cc", "dddddddd"], 0.19, 0.19, 3 / 18),
        (["aaa", "bbbbb", "cc", "dddddddd"], 0.05, 0.1, 3 / 18),  # at least one document
        (["bbbbb", "aaa", "cc", "aaa"], 0.05, 0.1, 6 / 13),  # with all its copies
        (["bbbbb", "bbbbb", "dddddddd"], 0.05, 0.3, 10 / 18),
        (["cc"], 0.05, 0.2, 1.0),
    ],
)
def test_limit_and_share_of_held_out_characters(
    hashes: None, texts: list[str], holdout: float, limit: float, share: float
) -> None:
    assert shards._limit(iter(texts), "a test", holdout) == pytest.approx((limit, share))


def test_document_at_the_limit_is_held_out(hashes: None) -> None:
    division = shards._Division(lambda: iter(HASHES), 0.2)
    assert [text for text in HASHES if division.trains(text)] == ["bbbbb", "dddddddd"]


def test_hashes_are_the_same_in_every_version() -> None:
    """Otherwise documents of a training split would move to the validation split."""
    assert shards._hash("one") == 0.20683083928766907
    assert shards._hash("two") == 0.9606679334477023


def divided(monkeypatch: pytest.MonkeyPatch, *shares: float) -> tuple[shards._Division, list[list[str]]]:
    """Division of a corpus whose whole documents, and then chunks, hold out these shares. `holdout` is 0.2."""
    monkeypatch.setattr(readers, "CHUNK_CHARS", 2)
    left, seen = [(0.5 + number, share) for number, share in enumerate(shares)], list[list[str]]()

    def limit(documents: Iterator[str], name: str, holdout: float) -> tuple[float, float]:
        assert (name, holdout) == ("a test", 0.2)
        seen.append(list(documents))
        return left.pop(0)

    monkeypatch.setattr(shards, "_limit", limit)
    return shards._divide(Corpus("a test", "digest", lambda: iter(["abcdefgh", "x"])), 0.2), seen


WHOLE, CHUNKS = ["abcdefgh", "x"], ["abcd", "efgh", "x"]


@pytest.mark.parametrize("share", [0.02, 0.021, 0.2, 0.599, 0.6])
def test_share_near_the_holdout_divides_whole_documents(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """A tenth of the holdout to the middle between it and everything."""
    division, seen = divided(monkeypatch, share)
    assert (list(division.documents()), division.limit, division.notes) == (WHOLE, 0.5, ())
    assert seen == [WHOLE]


@pytest.mark.parametrize(
    ("share", "of_chunks", "note"), [(0.019, 0.3, "2%"), (0.61, 0.3, "61%"), (1.0, 0.6, "100%"), (1.0, 0.001, "100%")]
)
def test_share_far_from_the_holdout_divides_chunks(
    monkeypatch: pytest.MonkeyPatch, share: float, of_chunks: float, note: str
) -> None:
    division, seen = divided(monkeypatch, share, of_chunks)
    assert (list(division.documents()), division.limit) == (CHUNKS, 1.5)
    assert division.notes == (f"Long documents are split to hold out 20%: whole documents would give {note}.",)
    assert seen == [WHOLE, CHUNKS]


def test_chunks_without_another_share_leave_documents_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    division, _ = divided(monkeypatch, 0.001, 0.001)
    assert (list(division.documents()), division.limit, division.notes) == (WHOLE, 0.5, ())


def test_corpus_that_would_be_held_out_for_the_most_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"\(a test\) cannot be split: it is one document, and 61% of it would be held out"):
        divided(monkeypatch, 1.0, 0.61)


def test_full_shard_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document is never divided: a shard ends with the document that fills it."""
    monkeypatch.setattr(shards, "SHARD_TOKENS", 5)
    writer = shards._ShardWriter(tmp_path, "train", "uint16")
    documents = [[1, 2, 3], [4], [5], [6, 7, 8, 9, 10, 11], [12]]
    for ids in documents:
        writer.add(ids)
    assert writer.finish() == [5, 6, 1] and writer.documents == 5
    read = [np.fromfile(tmp_path / f"train-0000{number}.bin", "uint16").tolist() for number in range(3)]
    assert read == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]


def test_limits_of_a_token_cache() -> None:
    """A shard of 128 MiB, and enough documents for stable merges."""
    assert (2 * shards.SHARD_TOKENS, shards.TOKENIZER_DOCUMENTS, shards.ENCODE_BATCH) == (128 * 1024 * 1024, 200_000, 64)


def test_tokens_are_counted_over_all_shards() -> None:
    meta = shards.Meta("uint16", {}, {"train": [5, 7], "validation": [2]}, "", [])
    assert meta.tokens == {"train": 12, "validation": 2}


def test_folder_is_named_after_format_corpus_vocabulary_and_holdout(own_home: Path) -> None:
    texts = ["one", "two", "three"]
    folder = shards.prepare(Corpus("a test", "digest", lambda: iter(texts)), 512, 0.1)
    assert folder.name == hashlib.blake2b(b'[2, "digest", 512, 0.1]', digest_size=10).hexdigest()


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_tokens_have_two_bytes_up_to_a_vocabulary_of_64_ki(own_home: Path, vocab: int, dtype: str) -> None:
    folder = shards.prepare(Corpus("a test", "digest", lambda: iter(["one", "two", "three"])), vocab, 0.1)
    meta = shards.read_meta(folder)
    assert meta.dtype == dtype
    sizes = [(folder / f"{split}-00000.bin").stat().st_size for split in ("train", "validation")]
    assert sum(sizes) == sum(meta.tokens.values()) * {"uint16": 2, "uint32": 4}[dtype]


def test_tokenizer_learns_from_the_first_training_documents_only(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "TOKENIZER_DOCUMENTS", 3)
    learned: list[str] = []
    train = shards.bpe.train
    monkeypatch.setattr(shards.bpe, "train", lambda texts, vocab: train((learned.append(t) or t for t in texts), vocab))
    texts = [f"document number {number}" for number in range(40)]
    folder = shards.prepare(Corpus("a test", "digest", lambda: iter(texts)), 512, 0.3)
    trains = [text for text in texts if hash_of(text) > 0.3]
    assert learned == trains[:3]
    assert shards.read_meta(folder).documents == {"train": len(trains), "validation": 40 - len(trains)}


def hash_of(text: str) -> float:
    return int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) / 16**16
