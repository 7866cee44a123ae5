"""Token cache: memory-mapped shards in a folder named after a digest of everything that determines their content."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from strata.platform.errors import UserError
from strata.platform.files import cache_dir
from strata.training.data import tokenizer as bpe
from strata.training.data.cached_folder import build_once
from strata.training.data.corpus import Corpus
from strata.training.data.digests import Files
from strata.training.data.readers import chunks

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

FORMAT = 2  # increased when the same corpus would produce different files
SHARD_TOKENS = 2**26
ENCODE_BATCH = 64  # documents; the encoder uses all cores for a list
TOKENIZER_DOCUMENTS = 200_000  # merges are stable long before this


@dataclass(frozen=True)
class Meta:
    """Metadata of the shards. `shards` has each split's token counts in file order, `digest` covers the shards' content, and
    `notes` are lines for the user, such as the parts of the corpus that were skipped."""

    dtype: str
    documents: dict[str, int]
    shards: dict[str, list[int]]
    digest: str
    notes: list[str]

    @property
    def tokens(self) -> dict[str, int]:
        return {split: sum(counts) for split, counts in self.shards.items()}


def shard_path(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05}.bin"


def read_meta(folder: Path) -> Meta:
    return Meta(**json.loads((folder / "meta.json").read_text()))


def prepare(corpus: Corpus, vocab: int, holdout: float, say: Callable[[str], None] = print) -> Path:
    """Folder with the tokenizer and the shards of this corpus. Builds it if it does not exist."""
    key = json.dumps([FORMAT, corpus.digest, vocab, holdout])
    folder = cache_dir() / "tokens" / hashlib.blake2b(key.encode(), digest_size=10).hexdigest()
    build_once(folder, lambda building: _build(corpus, vocab, holdout, building), _files, "tokens", say)
    return folder


def _files(folder: Path) -> list[Path]:
    return _files_of(folder, read_meta(folder))


def _files_of(folder: Path, meta: Meta) -> list[Path]:
    shards = [shard_path(folder, split, number) for split in SPLITS for number in range(len(meta.shards[split]))]
    return [folder / "tokenizer.json", *shards]


def _build(corpus: Corpus, vocab: int, holdout: float, folder: Path) -> None:
    division = _divide(corpus, holdout)
    learn_from = (text for text in division.documents() if division.trains(text))
    tokenizer = bpe.train(islice(learn_from, TOKENIZER_DOCUMENTS), vocab)
    tokenizer.save(str(folder / "tokenizer.json"))

    dtype = "uint16" if vocab <= 2**16 else "uint32"
    writers = {split: _ShardWriter(folder, split, dtype) for split in SPLITS}
    for text, ids in _encode(tokenizer, division.documents()):
        writers["train" if division.trains(text) else "validation"].add([*ids, bpe.END_OF_TEXT_ID])
    corpus.require_unchanged()
    meta = Meta(
        dtype=dtype,
        documents={split: writer.documents for split, writer in writers.items()},
        shards={split: writer.finish() for split, writer in writers.items()},
        digest="",
        notes=[*corpus.left_out.lines(), *division.notes],
    )
    meta = replace(meta, digest=Files(_files_of(folder, meta)).digest())
    (folder / "meta.json").write_text(json.dumps(asdict(meta)))


@dataclass(frozen=True)
class _Division:
    """Split of the corpus: documents with a hash up to `limit` are held out for validation."""

    documents: Callable[[], Iterator[str]]
    limit: float
    notes: tuple[str, ...] = ()

    def trains(self, text: str) -> bool:
        return _hash(text) > self.limit


def _hash(text: str) -> float:
    """Hash of a document's content in [0, 1). Copies of a document are always on the same side of the split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _divide(corpus: Corpus, holdout: float) -> _Division:
    """Splits by whole documents: the fraction `holdout`, and at least one document. With one huge document, nearly all or almost
    none of the text would be held out; then long documents are split into chunks first."""
    least, most = holdout / 10, (1 + holdout) / 2
    whole_limit, whole_share = _limit(corpus.documents(), corpus.name, holdout)
    if least <= whole_share <= most:
        return _Division(corpus.documents, whole_limit)

    def parts() -> Iterator[str]:
        for text in corpus.documents():
            yield from chunks(text)

    limit, share = _limit(parts(), corpus.name, holdout)
    if share > most:
        cause = f"The corpus ({corpus.name}) cannot be split: it is one document, and {share:.0%} of it would be held out."
        raise UserError(cause, "Use several different documents, or one of more than a few pages.")
    if share == whole_share:
        return _Division(corpus.documents, whole_limit)
    return _Division(
        parts, limit, (f"Long documents are split to hold out {holdout:.0%}: whole documents would give {whole_share:.0%}.",)
    )


def _limit(documents: Iterator[str], name: str, holdout: float) -> tuple[float, float]:
    """Largest hash of a held-out document, and the held-out fraction of all characters."""
    first, first_size, size, held_out = 1.0, 0, 0, 0
    for text in documents:
        value = _hash(text)
        if value < first:
            first, first_size = value, 0
        first_size += len(text) if value == first else 0
        held_out += len(text) if value <= holdout else 0
        size += len(text)
    if size == 0:
        fix = "Set data.path to a text, JSONL or Parquet file, or a folder of them."
        raise UserError(f"The corpus ({name}) has no text.", fix)
    return (holdout, held_out / size) if first <= holdout else (first, first_size / size)


def _encode(tokenizer: Tokenizer, documents: Iterator[str]) -> Iterator[tuple[str, list[int]]]:
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text, and does not end it
    while texts := list(islice(documents, ENCODE_BATCH)):
        for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            yield text, encoding.ids


class _ShardWriter:
    """Appends documents to numbered files, and starts the next file when one is full. Holds only counts in memory."""

    def __init__(self, folder: Path, split: Split, dtype: str) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._counts: list[int] = [0]
        self._file = shard_path(folder, split, 0).open("wb")
        self.documents = 0

    def add(self, ids: list[int]) -> None:
        if self._counts[-1] >= SHARD_TOKENS:
            self._file.close()
            self._file = shard_path(self._folder, self._split, len(self._counts)).open("wb")
            self._counts.append(0)
        self._file.write(np.array(ids, self._dtype).tobytes())
        self._counts[-1] += len(ids)
        self.documents += 1

    def finish(self) -> list[int]:
        self._file.close()
        return self._counts
