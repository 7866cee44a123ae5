"""Writes a generated data set: JSONL shards for training, and held-out rows beside them."""

import json
import shutil
import tempfile
from pathlib import Path

from strata.platform.errors import UserError
from strata.training.data.generated.rows import Kind, Row, rows

SHARD_ROWS = 1000
HELD_OUT_ROWS = 200


def write(folder: Path, kind: Kind, count: int, seed: int) -> Path:
    """Writes `count` rows to `folder`/train and others to `folder`/held-out.jsonl. Returns the folder to train on.

    The folder is built beside its path and renamed, so it is complete or absent.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already.", "Choose another folder with --to, or remove this one.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        building.chmod(0o755)  # mkdtemp creates it with mode 0700
        train = building / "train"
        train.mkdir()
        made = rows(kind, count, seed)
        for number, start in enumerate(range(0, count, SHARD_ROWS)):
            shard = [next(made) for _ in range(min(SHARD_ROWS, count - start))]
            (train / f"{kind}-{number:05}.jsonl").write_text(_jsonl(shard))
        (building / "held-out.jsonl").write_text(_jsonl(list(rows(kind, HELD_OUT_ROWS, seed, held_out=True))))
        building.replace(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder / "train"


def _jsonl(shard: list[Row]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in shard)
