import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection
from strata.training.data import cached_folder, digests, shards
from strata.training.data import tokenizer as bpe
from strata.training.data.corpus import Corpus, open_corpus
from strata.training.data.windows import Windows

VOCAB = 512


def corpus_of(*texts: str) -> Corpus:
    return Corpus("a test", str(hash(texts)), lambda: iter(texts))


def no_message(message: object) -> bytes:
    raise AssertionError(message)


def split_texts(folder: Path, split: shards.Split) -> list[str]:
    tokenizer = bpe.load(folder)
    meta = shards.read_meta(folder)
    files = [shards.shard_path(folder, split, number) for number in range(len(meta.shards[split]))]
    ids = np.concatenate([np.fromfile(path, meta.dtype) for path in files])
    ends = np.flatnonzero(ids == bpe.END_OF_TEXT_ID)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(document[:-1].tolist()) for document in np.split(ids, ends[:-1] + 1)]


def test_every_document_is_in_exactly_one_split(home: Path) -> None:
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


def test_second_call_uses_the_cache(home: Path) -> None:
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
        raise UserError("line 2 is bad", "fix it")

    with pytest.raises(UserError):
        shards.prepare(Corpus("a test", "digest", documents), VOCAB, 0.1)
    assert list((home / ".strata" / "tokens").iterdir()) == []


def test_empty_corpus_is_refused(home: Path) -> None:
    with pytest.raises(UserError, match="has no text"):
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


def test_evaluation_windows_are_spread_evenly(tokens: Path) -> None:
    windows = Windows(tokens, "validation", 32)
    assert windows.evenly(10**6).tolist() == list(range(len(windows)))
    few = windows.evenly(3)
    assert few[0] == 0 and few[-1] == len(windows) - 1 and len(few) == 3


def test_large_vocabulary_gets_wider_tokens(home: Path) -> None:
    folder = shards.prepare(corpus_of("one", "two", "three"), 70_000, 0.1)
    assert json.loads((folder / "meta.json").read_text())["dtype"] == "uint32"


def shares(folder: Path) -> float:
    tokens = shards.read_meta(folder).tokens
    return tokens["validation"] / sum(tokens.values())


def words(count: int) -> str:
    return " ".join(f"word{number * number % 997}" for number in range(count))


@pytest.mark.parametrize("others", [[], ["short", "shorter"], [f"short {number}" for number in range(30)]])
def test_huge_document_is_split(home: Path, others: list[str]) -> None:
    """With whole documents, either the huge one is held out or only tiny ones are."""
    folder = shards.prepare(corpus_of(words(60_000), *others), VOCAB, 0.1)
    assert 0.01 < shares(folder) < 0.4
    assert len(shards.read_meta(folder).notes) == 1


def test_split_of_a_huge_document_is_reported(home: Path) -> None:
    folder = shards.prepare(corpus_of(words(60_000)), VOCAB, 0.1)
    assert shards.read_meta(folder).notes == ["Long documents are split to hold out 10%: whole documents would give 100%."]
    assert "".join(sorted(split_texts(folder, "train") + split_texts(folder, "validation"))).count("word") == 60_000


@pytest.mark.parametrize("texts", [["a few words"], ["the same"] * 50])
def test_one_short_document_is_refused(home: Path, texts: list[str]) -> None:
    with pytest.raises(UserError, match="cannot be split: it is one document, and 100% of it would be held out"):
        shards.prepare(corpus_of(*texts), VOCAB, 0.1)


def test_end_of_text_in_a_document_is_text(home: Path) -> None:
    texts = ["before <|endoftext|> after", "another", "a third"]
    folder = shards.prepare(corpus_of(*texts), VOCAB, 0.1)
    assert sorted(split_texts(folder, "train") + split_texts(folder, "validation")) == sorted(texts)


def test_cache_records_what_was_skipped(home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": null}\n')
    (tmp_path / "b.bin").write_bytes(b"\0")
    for _ in range(2):  # the second time from the cache
        notes = shards.read_meta(shards.prepare(open_corpus(DataSection(path=tmp_path)), VOCAB, 0.1)).notes
        assert [note.split(" left out")[0] for note in notes] == ["1 of 2 files", "1 of 3 documents"]


def test_corpus_that_changes_is_refused(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one line\n" * 10_000)
    corpus = open_corpus(DataSection(path=path))

    def documents() -> Iterator[str]:
        yield from corpus.documents()
        with path.open("a") as file:
            file.write("more\n")

    with pytest.raises(UserError, match=r"a\.txt changed while it was being read"):
        shards.prepare(replace(corpus, documents=documents), VOCAB, 0.1)


def test_damaged_cache_is_rebuilt_and_reported(home: Path) -> None:
    corpus = corpus_of(*(f"document number {number}" for number in range(100)))
    folder = shards.prepare(corpus, VOCAB, 0.1, no_message)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, damage in (
        ("train-00000.bin", lambda path: path.write_bytes(path.read_bytes()[:-2])),
        ("train-00000.bin", lambda path: path.write_bytes(b"\xff\xff" + path.read_bytes()[2:])),
        ("validation-00000.bin", Path.unlink),
        ("tokenizer.json", lambda path: path.write_text("{")),
        ("meta.json", lambda path: path.write_text("{")),
        ("meta.json", Path.unlink),
    ):
        damage(folder / name)
        messages: list[str] = []
        assert shards.prepare(corpus, VOCAB, 0.1, messages.append) == folder
        assert len(messages) == 1 and "are damaged" in messages[0] and "building them again" in messages[0]
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_unchanged_cache_is_not_read_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = corpus_of("one", "two", "three")
    folder = shards.prepare(corpus, VOCAB, 0.1)
    monkeypatch.setattr(digests, "_content", no_message)
    assert shards.prepare(corpus, VOCAB, 0.1) == folder


def test_cache_that_cannot_be_written_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards._ShardWriter, "add", full)
    with pytest.raises(UserError, match=r"tokens/\w+ cannot be written: No space left on device"):
        shards.prepare(corpus_of("one", "two", "three"), VOCAB, 0.1)


def test_partial_folder_of_a_killed_build_is_removed(home: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    tokens = home / ".strata" / "tokens"
    names = {f"{cached_folder.BUILDING}{pid}-x" for pid in (killed.pid, os.getpid())} | {".building-another-machine-1-x"}
    for name in names:
        (tokens / name).mkdir(parents=True)
    folder = shards.prepare(corpus_of("one", "two", "three"), VOCAB, 0.1)
    left = {path.name for path in tokens.iterdir()}
    assert left == names - {f"{cached_folder.BUILDING}{killed.pid}-x"} | {folder.name}
