"""Documents to tokens on disk, once: memory-mapped shards in a cache folder named after all that decides their content.

The folder is built beside its final place and renamed, so a cache entry is whole or absent, also when two runs make the
same one at once.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from strata.platform.errors import UserError
from strata.platform.files import cache_dir
from strata.training import tokenizer as bpe
from strata.training.corpus import Corpus

Split = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

FORMAT = 1  # raised when the same corpus would give other files than before
SHARD_TOKENS = 2**26
ENCODE_AT_ONCE = 64  # documents; the encoder spreads a list over all cores
TOKENIZER_DOCUMENTS = 200_000  # merges settle long before this


@dataclass(frozen=True)
class Meta:
    """What a reader of the shards needs to know; `shards` holds each split's token counts in file order."""

    dtype: str
    documents: dict[str, int]
    shards: dict[str, list[int]]

    @property
    def tokens(self) -> dict[str, int]:
        return {split: sum(counts) for split, counts in self.shards.items()}


def shard_path(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05}.bin"


def read_meta(folder: Path) -> Meta:
    return Meta(**json.loads((folder / "meta.json").read_text()))


def prepare(corpus: Corpus, vocab: int, holdout: float) -> Path:
    """The folder that holds tokenizer and shards of this corpus, made now if it is not there yet."""
    key = json.dumps([FORMAT, corpus.digest, vocab, holdout])
    folder = cache_dir() / "tokens" / hashlib.blake2b(key.encode(), digest_size=10).hexdigest()
    if (folder / "meta.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    try:
        _build(corpus, vocab, holdout, building)
        building.rename(folder)
    except OSError:
        if not (folder / "meta.json").is_file():  # else another run was faster, with the same content
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _build(corpus: Corpus, vocab: int, holdout: float, folder: Path) -> None:
    limit = _holdout_limit(corpus, holdout)
    learn_from = (text for text in corpus.documents() if _place(text) > limit)
    tokenizer = bpe.train(islice(learn_from, TOKENIZER_DOCUMENTS), vocab)
    tokenizer.save(str(folder / "tokenizer.json"))

    dtype = "uint16" if vocab <= 2**16 else "uint32"
    writers = {split: _ShardWriter(folder, split, dtype) for split in SPLITS}
    for text, ids in _encode(tokenizer, corpus.documents()):
        writers["train" if _place(text) > limit else "validation"].add([*ids, bpe.END_OF_TEXT_ID])
    meta = Meta(
        dtype=dtype,
        documents={split: writer.documents for split, writer in writers.items()},
        shards={split: writer.finish() for split, writer in writers.items()},
    )
    (folder / "meta.json").write_text(json.dumps(asdict(meta)))


def _place(text: str) -> float:
    """A document's place in [0, 1), by its content: copies of one document always end on the same side of the split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _holdout_limit(corpus: Corpus, holdout: float) -> float:
    """Documents up to this place are held out: the share asked for, and the first in any case, however small the corpus."""
    first, count = 1.0, 0
    for text in corpus.documents():
        first, count = min(first, _place(text)), count + 1
    if count == 0:
        fix = "Point data.path at a text, JSONL or Parquet file, or a folder of them."
        raise UserError(f"The corpus ({corpus.name}) holds no text.", fix)
    return max(first, holdout)


def _encode(tokenizer: Tokenizer, documents: Iterator[str]) -> Iterator[tuple[str, list[int]]]:
    while texts := list(islice(documents, ENCODE_AT_ONCE)):
        for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            yield text, encoding.ids


class _ShardWriter:
    """Appends documents to numbered files and goes on to the next one when a file is full; remembers only counts."""

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
