"""A user's folder of pictures with captions.

Captions are in `metadata.jsonl`, as in a Hugging Face imagefolder ({"file_name": "a.png", "text": "..."}), or for each picture in
a text file of the same name (`a.png`, `a.txt`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from strata.platform.errors import UserError

KINDS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
METADATA = "metadata.jsonl"
LAYOUT = f"Put name.txt with a caption beside each name.png, or write {METADATA} with file_name and text."


@dataclass(frozen=True)
class Captioned:
    picture: Path
    caption: str


def find(folder: Path, text_field: str) -> list[Captioned]:
    """Pictures of a folder with their captions, sorted by path. Raises UserError at the first that is not usable."""
    if not folder.is_dir():
        raise UserError(f"data.path={folder} is not a folder.", "Pass a folder of pictures with captions.")
    metadata = folder / METADATA
    found = sorted(_listed(metadata, text_field) if metadata.is_file() else _paired(folder), key=lambda one: str(one.picture))
    if len(found) < 2:
        raise UserError(f"data.path={folder} has {len(found)} pictures with captions; training needs two or more.", LAYOUT)
    return found


def _paired(folder: Path) -> Iterator[Captioned]:
    for picture in folder.rglob("*"):
        if picture.suffix.lower() in KINDS and picture.is_file():
            text = picture.with_suffix(".txt")
            if not text.is_file():
                raise UserError(f"{picture} has no caption: {text.name} is missing.", LAYOUT)
            try:
                caption = text.read_text().strip()
            except UnicodeDecodeError:
                raise UserError(f"{text} is not UTF-8 text.", "Save it as UTF-8.") from None
            yield Captioned(picture, _worded(caption, str(text)))


def _listed(metadata: Path, text_field: str) -> Iterator[Captioned]:
    seen = set()
    for number, line in enumerate(metadata.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{metadata}, line {number}"
        row = _row(line, where)
        name, caption = row.get("file_name"), row.get(text_field)
        if not isinstance(name, str) or not isinstance(caption, str):
            missing = "file_name" if not isinstance(name, str) else text_field
            fix = f"Each row needs file_name and {text_field} (data.text_field) as strings."
            raise UserError(f"{where} has no '{missing}' with a string.", fix)
        picture = metadata.parent / name
        if not picture.is_file() or not picture.resolve().is_relative_to(metadata.parent.resolve()):
            raise UserError(f"{where}: {name} is no file in {metadata.parent}.", "Correct file_name, or add the picture.")
        if picture in seen:
            raise UserError(f"{where}: {name} is in an earlier line too.", "Leave one of the lines.")
        seen.add(picture)
        yield Captioned(picture, _worded(caption.strip(), where))


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}.", "Correct the line.") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object.", "Correct the line.")
    return row


def _worded(caption: str, where: str) -> str:
    if not caption:
        raise UserError(f"The caption in {where} is empty.", "Describe the picture, or remove it.")
    return caption


def read(picture: Path, size: int) -> NDArray[np.uint8]:
    """[size, size, 3]: the middle square of a picture, upright, transparent parts white."""
    try:
        with Image.open(picture) as opened:
            upright = ImageOps.exif_transpose(opened).convert("RGBA")
    except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{picture} cannot be read as a picture: {error}.", "Replace it, or remove it.") from None
    opaque = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright).convert("RGB")
    return np.asarray(ImageOps.fit(opaque, (size, size), Image.Resampling.LANCZOS), np.uint8)
