"""Prepares the pictures of a run once, in the cache: the tokenizer of the captions and, for a user's folder, its pictures at the
model's size. Generated pictures are drawn when they are read, and take no space."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from strata.platform.files import cache_dir
from strata.platform.recipe import DataSection, ModelSection
from strata.training.data.cached_folder import all_files, build_once
from strata.training.data.digests import Files
from strata.training.data.pictures import captions, folder, scenes
from strata.training.data.shards import SPLITS, Split

FORMAT = 1
SHOWN_SCENES = 2000  # whose captions are read for the vocabulary: every word occurs in these


@dataclass(frozen=True)
class Meta:
    """Prepared pictures. `count` is that of each split of a user's folder; generated pictures never end."""

    holdout: float
    size: int
    count: dict[str, int] | None
    digest: str = ""

    @property
    def generated(self) -> bool:
        return self.count is None


def prepare(data: DataSection, model: ModelSection, say: Callable[[str], None] = print) -> Path:
    """Folder of the prepared pictures. Builds it if it does not exist."""
    assert model.picture
    found = folder.find(data.path, data.text_field) if data.path else None
    files = Files(_files(data.path, found)) if data.path and found else None
    content = f"{scenes.VERSION}" if files is None else files.digest(f"{[str(one.picture) for one in found or ()]}")
    key = json.dumps([FORMAT, content, data.text_field, model.vocab, model.picture.size, data.holdout])
    prepared = cache_dir() / "pictures" / hashlib.blake2b(key.encode(), digest_size=10).hexdigest()

    def build(building: Path) -> None:
        meta = Meta(data.holdout, model.picture.size if model.picture else 0, None)
        if found is None:
            learn_from: Iterable[str] = (scenes.scene("train", data.holdout, 0, index).caption for index in range(SHOWN_SCENES))
        else:
            meta = replace(meta, count=_store(found, data.holdout, meta.size, building))
            learn_from = read_captions(building, "train")
        captions.build(learn_from, model.vocab).save(str(building / captions.TOKENIZER))
        if files:
            files.require_unchanged()
        meta = replace(meta, digest=Files(all_files(building)).digest())
        (building / "meta.json").write_text(json.dumps(asdict(meta)))

    build_once(prepared, build, all_files, "pictures", say)
    return prepared


def read_meta(prepared: Path) -> Meta:
    return Meta(**json.loads((prepared / "meta.json").read_text()))


def read_captions(prepared: Path, split: Split) -> list[str]:
    found: list[str] = json.loads((prepared / f"captions-{split}.json").read_text())
    return found


def pictures_path(prepared: Path, split: Split) -> Path:
    return prepared / f"pictures-{split}.npy"


def _files(path: Path, found: list[folder.Captioned]) -> list[Path]:
    metadata = path / folder.METADATA
    texts = [metadata] if metadata.is_file() else [one.picture.with_suffix(".txt") for one in found]
    return [*(one.picture for one in found), *texts]


def _store(found: list[folder.Captioned], holdout: float, size: int, building: Path) -> dict[str, int]:
    """Writes pictures and captions of both splits. Pictures with the same caption are in the same split, the order of captions'
    hashes decides in which."""
    hashes = {one.caption: hashlib.blake2b(one.caption.encode(), digest_size=8).digest() for one in found}
    ordered = sorted(hashes, key=lambda caption: hashes[caption])
    held_out = set(ordered[: min(max(1, round(holdout * len(ordered))), len(ordered) - 1)])
    counts: dict[str, int] = {}
    for split in SPLITS:
        some = [one for one in found if (one.caption in held_out) == (split == "validation")] or found  # one caption for all
        stored = np.lib.format.open_memmap(pictures_path(building, split), "w+", np.uint8, (len(some), size, size, 3))  # type: ignore[no-untyped-call]
        for number, one in enumerate(some):
            stored[number] = folder.read(one.picture, size)
        stored.flush()
        (building / f"captions-{split}.json").write_text(json.dumps([one.caption for one in some]))
        counts[split] = len(some)
    return counts
