"""Rendered examples of one input, cached by content: a preparation that was killed continues with the next input.

The cache does not depend on the context or on the split, so other rows of the same data need no tokenizer. Tokens are stored as
32-bit integers, with the mask in the highest bit.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.training.data.cached_folder import all_files, build_once
from strata.training.data.digests import Files
from strata.training.data.finetuning.examples import Example, Place
from strata.training.data.finetuning.rendering import Document, Renderer, load_tokenizer
from strata.training.data.finetuning.sources import Input, read_examples, unit
from strata.training.data.left_out import LeftOut

FORMAT = 1  # increased when the same input would be rendered differently
BATCH = 256  # examples that are tokenized together
COUNTED = np.uint32(1 << 31)
UNLABELED = -1


@dataclass(frozen=True)
class Job:
    """Rendering of one input. `template` is the text of a chat template that replaces the tokenizer's own."""

    source: Input
    tokenizer: Path
    tokenizer_digest: str
    template: str | None
    mask: str
    cache: Path

    @property
    def folder(self) -> Path:
        source = self.source
        text_field = source.text_field if source.kind == "text" else None
        key = [FORMAT, source.digest, source.kind, text_field, source.alone, self.tokenizer_digest, self.template, self.mask]
        return self.cache / hashlib.blake2b(json.dumps(key).encode(), digest_size=10).hexdigest()


@dataclass(frozen=True)
class Meta:
    """Metadata of a rendered input. `special` maps each added token in use to the number of the first example with it; `named`
    counts examples whose text contains the name of a special token; `skipped` is the reason for which a file was not read."""

    unit: str
    read: int
    documents: int
    empty: int
    first_empty: str
    skipped: str | None
    special: dict[str, int]
    named: int
    first_named: int
    digest: str = ""


def render(job: Job, say: Callable[[str], None] = print) -> None:
    """Renders an input into its folder unless that exists."""
    build_once(job.folder, lambda folder: _build(job, folder), all_files, "rendered examples", say)


@lru_cache(maxsize=1)
def _renderer(tokenizer: Path, digest: str, template: str | None, mask: str) -> Renderer:
    """Renderer of this process. The digest makes a changed tokenizer another one."""
    return Renderer(load_tokenizer(tokenizer), template, mask)


@dataclass
class _Writer:
    """Appends documents to a file of tokens. Only the index stays in memory."""

    added: NDArray[np.uint32]
    tokens: int = 0
    documents: list[int] = field(default_factory=lambda: [0])  # end of each document, in tokens
    examples: list[int] = field(default_factory=lambda: [0])  # end of each example, in documents
    numbers: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)

    def add(self, example: Example, documents: list[Document], file: Any) -> None:
        for document in documents:
            file.write((document.ids | (document.mask * COUNTED)).astype("<u4").tobytes())
            self.tokens += len(document.ids)
            self.documents.append(self.tokens)
            for token in np.intersect1d(document.ids, self.added).tolist():
                self.special.setdefault(str(token), example.place.number)
        self.examples.append(len(self.documents) - 1)
        self.numbers.append(example.place.number)
        self.hashes.append(example.content_hash())
        self.labels.append(UNLABELED if example.label is None else int(example.label))

    def save(self, folder: Path) -> None:
        np.savez(
            folder / "index.npz",
            documents=np.array(self.documents, np.int64),
            examples=np.array(self.examples, np.int64),
            numbers=np.array(self.numbers, np.int64),
            hashes=np.array(self.hashes, np.uint64),
            labels=np.array(self.labels, np.int8),
        )


def _build(job: Job, folder: Path) -> None:
    renderer = _renderer(job.tokenizer, job.tokenizer_digest, job.template, job.mask)
    left_out, writer = LeftOut(), _Writer(renderer.added_ids)
    named: list[int] = []
    with (folder / "tokens.bin").open("wb") as file:
        for batch in _batches(read_examples(job.source, left_out)):
            for example, documents in zip(batch, renderer.render(batch), strict=True):
                writer.add(example, documents, file)
                if renderer.names_special_token(example):
                    named.append(example.place.number)
    writer.save(folder)
    meta = Meta(
        unit=unit(job.source),
        read=left_out.read,
        documents=left_out.documents,
        empty=left_out.empty,
        first_empty=left_out.first_empty.removesuffix(f" of {job.source.name}"),  # the file may move
        skipped=next(iter(left_out.files.values()), None),
        special=writer.special,
        named=len(named),
        first_named=named[0] if named else 0,
        digest=Files(all_files(folder)).digest(),
    )
    (folder / "meta.json").write_text(json.dumps(asdict(meta)))


def _batches(examples: Iterator[Example]) -> Iterator[list[Example]]:
    while batch := list(islice(examples, BATCH)):
        yield batch


class RenderedInput:
    """Rendered examples of an input. Example e has the documents examples[e] to examples[e + 1], and document d the tokens
    documents[d] to documents[d + 1]. Only the index is in memory, and no file stays open: there may be thousands of inputs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.meta = Meta(**json.loads((folder / "meta.json").read_text()))
        self._tokens = folder / "tokens.bin"
        with np.load(folder / "index.npz") as index:
            self.documents: NDArray[np.int64] = index["documents"]
            self.examples: NDArray[np.int64] = index["examples"]
            self.numbers: NDArray[np.int64] = index["numbers"]
            self.hashes: NDArray[np.uint64] = index["hashes"]
            self.labels: NDArray[np.int8] = index["labels"]

    def read(self, begin: int, end: int) -> NDArray[np.uint32]:
        """Tokens with the mask in the highest bit."""
        return np.fromfile(self._tokens, "<u4", count=end - begin, offset=4 * begin)

    def place(self, example: int) -> Place:
        return Place(self.name, self.meta.unit, int(self.numbers[example]))
