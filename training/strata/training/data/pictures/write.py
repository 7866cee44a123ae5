"""Writes generated pictures: a grid to look at, and a folder to train on."""

import io
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from strata.platform.errors import UserError
from strata.training.data.pictures import scenes
from strata.training.data.pictures.folder import METADATA
from strata.training.data.pictures.rendering import render, to_bytes
from strata.training.data.shards import Split

GRID = "grid.png"
GRID_PICTURES = 64
HOLDOUT = 0.05  # as the recipe's default
GAP = 2  # pixels between the pictures of a grid


def grid_png(pictures: Sequence[NDArray[np.uint8]], scale: int = 1) -> bytes:
    """PNG file of pictures in rows, as square as possible, each pixel `scale` wide."""
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    height, width, _ = pictures[0].shape
    grid = np.full((rows * (height + GAP) + GAP, columns * (width + GAP) + GAP, 3), 128, np.uint8)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        top, left = GAP + row * (height + GAP), GAP + column * (width + GAP)
        grid[top : top + height, left : left + width] = picture
    file = io.BytesIO()
    Image.fromarray(grid.repeat(scale, 0).repeat(scale, 1)).save(file, "PNG")
    return file.getvalue()


def write(folder: Path, count: int, seed: int, size: int = 32) -> Path:
    """Writes `count` pictures to `folder`/train and held-out ones to `folder`/held-out, each with metadata.jsonl, and a grid.
    Returns the folder to train on. The folder is complete or absent."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already.", "Choose another folder with --to, or remove this one.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        building.chmod(0o755)  # mkdtemp creates it with mode 0700
        pictures = _write_split(building / "train", "train", count, seed, size)
        _write_split(building / "held-out", "validation", max(1, count // 20), seed, size)
        (building / GRID).write_bytes(grid_png(pictures[:GRID_PICTURES], scale=3))
        building.replace(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder / "train"


def _write_split(folder: Path, split: Split, count: int, seed: int, size: int) -> list[NDArray[np.uint8]]:
    folder.mkdir()
    rows, pictures = [], []
    for index in range(count):
        scene = scenes.scene(split, HOLDOUT, seed, index)
        pictures.append(to_bytes(render(scene, size)))
        name = f"{index:06}.png"
        Image.fromarray(pictures[-1]).save(folder / name)
        rows.append(json.dumps({"file_name": name, "text": scene.caption}))
    (folder / METADATA).write_text("".join(f"{row}\n" for row in rows))
    return pictures
