"""Sources of a model: a folder, a run, a URI of a bucket, or an id on Hugging Face."""

import json
import re
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError, shown
from strata.platform.files import home
from strata.platform.model_families import bucket, copies, hub

RUN = re.compile(r"[\w.-]{1,100}")
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MOST_CONFIG = 2**24  # bytes


def local(source: str, key: str = "model.from") -> Path | None:
    """Absolute path of a source that is a folder, or a run with an export; None for a URI or an id. `key` is the
    recipe's key that has it."""
    if bucket.is_uri(source):
        return None
    try:
        path = Path(source).expanduser()
        if source.strip() and path.is_dir():
            return path.resolve()
    except (OSError, RuntimeError, ValueError):  # such as a name that is too long, an unknown user, or a zero byte
        pass
    if ID.fullmatch(source):
        return None
    run = home() / "runs" / source
    if RUN.fullmatch(source) and run.is_dir():
        if (run / "export" / "config.json").is_file():
            return (run / "export").resolve()
        raise UserError(f"{key}={source} is a run without an export.", f"Write it: strata export {source}")
    fix = "Give a model's folder, a run's name, a URI such as gs://bucket/model, or an id on Hugging Face."
    raise UserError(f"{key}={shown(source, 200)} is neither a folder nor a run.", fix)


def read_config(source: str) -> dict[str, Any]:
    if bucket.is_uri(source):
        return _parse_text(bucket.Bucket(source).read("config.json", MOST_CONFIG + 1), f"{source.rstrip('/')}/config.json")
    folder = local(source)
    if folder is None:
        return _parse(hub.config(source))
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json.", "Give the folder of a Hugging Face model.")
    return _parse(folder / "config.json")


def snapshot(source: str) -> Path:
    """Folder with the model's files. A URI or an id is downloaded, unless a copy is here (`copies.py`)."""
    folder = local(source)
    if folder is not None:
        return folder
    if bucket.is_uri(source):
        return copies.pull(source)
    return copies.found(source) or hub.snapshot(source)


def is_remote(source: str) -> bool:
    """True if a source is a URI, or the id of a model of which there is no folder here."""
    return bucket.is_uri(source) or (bool(ID.fullmatch(source)) and not Path(source).is_dir())


def _parse(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return _parse_text(file.read(MOST_CONFIG + 1), str(path))


def _parse_text(text: bytes, path: str) -> dict[str, Any]:
    fix = "Restore the file, or use another model."
    try:
        if len(text) > MOST_CONFIG:
            raise UserError(f"{path} is too large for a model's configuration.", fix)
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not valid JSON: {shown(error, 120)}.", fix) from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not a model's configuration.", fix)
    return values
