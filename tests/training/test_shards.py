import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strata.platform.errors import UserError
from strata.training import shards
from strata.training import tokenizer as bpe
from strata.training.corpus import Corpus
from strata.training.windows import Windows

VOCAB = 512


def corpus_of(*texts: str) -> Corpus:
    return Corpus("a test", str(hash(texts)), lambda: iter(texts))


def split_texts(folder: Path, split: shards.Split) -> list[str]:
    tokenizer = bpe.load(folder)
    meta = shards.read_meta(folder)
    files = [shards.shard_path(folder, split, number) for number in range(len(meta.shards[split]))]
    ids = np.concatenate([np.fromfile(path, meta.dtype) for path in files])
    ends = np.flatnonzero(ids == bpe.END_OF_TEXT_ID)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(document[:-1].tolist()) for document in np.split(ids, ends[:-1] + 1)]


def test_every_document_is_in_one_split_and_comes_back(home: Path) -> None:
    texts = [f"document number {number} says {number * number}" for number in range(300)]
    folder = shards.prepare(corpus_of(*texts), VOCAB, 0.1)
    train, validation = split_texts(folder, "train"), split_texts(folder, "validation")
    assert sorted(train + validation) == sorted(texts)
    assert 10 < len(validation) < 60
    assert shards.read_meta(folder).documents == {"train": len(train), "validation": len(validation)}


def test_copies_of_a_document_stay_together(home: Path) -> None:
    texts = [f"text {number}" for number in range(100)] * 2
    folder = shards.prepare(corpus_of(*texts), VOCAB, 0.3)
    assert not set(split_texts(folder, "train")) & set(split_texts(folder, "validation"))


def test_small_corpus_still_holds_one_document_out(home: Path) -> None:
    folder = shards.prepare(corpus_of("one", "two", "three"), VOCAB, 0.001)
    assert shards.read_meta(folder).documents == {"train": 2, "validation": 1}


def test_second_time_comes_from_the_cache(home: Path) -> None:
    reads = 0

    def documents() -> Iterator[str]:
        nonlocal reads
        reads += 1
        return iter(f"text {number}" for number in range(20))

    corpus = Corpus("a test", "digest", documents)
    folder = shards.prepare(corpus, VOCAB, 0.1)
    after_first = reads
    assert shards.prepare(corpus, VOCAB, 0.1) == folder
    assert reads == after_first
    assert shards.prepare(corpus, VOCAB, 0.2) != folder
    assert shards.prepare(corpus, VOCAB + 1, 0.1) != folder


def test_failure_leaves_no_folder(home: Path) -> None:
    def documents() -> Iterator[str]:
        yield "a text"
        raise UserError("line 2 is bad", "mend it")

    with pytest.raises(UserError):
        shards.prepare(Corpus("a test", "digest", documents), VOCAB, 0.1)
    assert list((home / ".strata" / "tokens").iterdir()) == []


def test_empty_corpus_is_refused(home: Path) -> None:
    with pytest.raises(UserError, match="holds no text"):
        shards.prepare(corpus_of(), VOCAB, 0.1)


def test_windows_cover_every_shard_and_overlap_by_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 200)
    texts = [f"document number {number} says {number * number}" for number in range(200)]
    folder = shards.prepare(corpus_of(*texts), VOCAB, 0.05)
    meta = shards.read_meta(folder)
    assert len(meta.shards["train"]) > 2
    windows = Windows(folder, "train", 16)
    assert len(windows) == sum((count - 1) // 16 for count in meta.shards["train"])
    read = windows.read(np.arange(len(windows)))
    assert read.shape == (len(windows), 17)
    in_first = (meta.shards["train"][0] - 1) // 16
    first = np.fromfile(shards.shard_path(folder, "train", 0), meta.dtype)
    assert read[:in_first, :-1].ravel().tolist() == first[: in_first * 16].tolist()
    assert (read[1:in_first, 0] == read[: in_first - 1, -1]).all()


def test_evaluation_windows_are_spread_and_never_more_than_there_are(tokens: Path) -> None:
    windows = Windows(tokens, "validation", 32)
    assert windows.evenly(10**6).tolist() == list(range(len(windows)))
    few = windows.evenly(3)
    assert few[0] == 0 and few[-1] == len(windows) - 1 and len(few) == 3


def test_large_vocabulary_gets_wider_tokens(home: Path) -> None:
    folder = shards.prepare(corpus_of("one", "two", "three"), 70_000, 0.1)
    assert json.loads((folder / "meta.json").read_text())["dtype"] == "uint32"
