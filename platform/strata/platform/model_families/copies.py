"""Copies of models from Hugging Face or a bucket: complete or absent, one download per machine.

A pod has its copies on a volume of its own (STRATA_MODELS). A job may have placed one on the shared storage before
(`strata model pull` with STRATA_MODELS there); all pods then use it and download nothing.
"""

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from strata.platform.errors import UserError
from strata.platform.files import cache_dir, home
from strata.platform.model_families import bucket, hub

MODELS = "STRATA_MODELS"
COMPLETE = ".complete"  # written last; holds the identity of a bucket's files


def models_dir() -> Path:
    return Path(os.environ[MODELS]) if os.environ.get(MODELS) else cache_dir() / "models"


def name(given: str) -> str:
    """Name of the model in the API and in messages: the last part of its source."""
    parts = [part for part in given.split("/") if part]
    return parts[-2] if len(parts) > 1 and parts[-1] == "export" else parts[-1]


def place(given: str) -> Path:
    """Folder of the copy on this machine."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", given.partition("://")[2] or given)[-60:].strip("-.")
    return models_dir() / f"{readable}-{hashlib.sha256(given.encode()).hexdigest()[:8]}"


def found(given: str) -> Path | None:
    """A complete copy on this machine or on the shared storage."""
    own = place(given)
    return next((folder for folder in (own, home() / "models" / own.name) if (folder / COMPLETE).is_file()), None)


def pull(given: str) -> Path:
    """Copies a model unless a copy is here, and returns its folder. A bucket's files are compared with the copy on this machine,
    and copied again if they have changed. Concurrent calls on a machine download once."""
    folder = place(given)
    copy = found(given)
    if copy and (copy != folder or not bucket.is_uri(given)):
        return copy
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")):
            _download(given, folder)
    except OSError as error:
        fix = f"Set {MODELS} to a folder with enough space for the model."
        raise UserError(f"{given} cannot be copied to {folder}: {error.strerror or error}.", fix) from None
    return folder


def _download(given: str, folder: Path) -> None:
    opened = bucket.Bucket(given) if bucket.is_uri(given) else None
    files = opened.files([*hub.SMALL_FILES, *hub.WEIGHTS]) if opened else {}
    version = bucket.identity(files)
    if _version(folder) == version:
        return
    if opened and ("config.json" not in files or not any(name.endswith(".safetensors") for name in files)):
        fix = "Give the folder of a Hugging Face model: config.json, model*.safetensors and a tokenizer."
        raise UserError(f"{given} has no config.json or no model*.safetensors.", fix)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        partial.chmod(0o755)
        if opened:
            opened.download(list(files), partial)
        else:
            hub.snapshot(given, partial)
            shutil.rmtree(partial / ".cache", ignore_errors=True)  # records of huggingface_hub
        (partial / COMPLETE).write_text(version)
        shutil.rmtree(folder, ignore_errors=True)  # an older version; who has its files open can read them to the end
        partial.rename(folder)
    except OSError:
        if _version(folder) != version:  # otherwise a process on storage without locks was first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _version(folder: Path) -> str | None:
    try:
        return (folder / COMPLETE).read_text()
    except FileNotFoundError:
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        with suppress(OSError):  # storage without locks: the slower of two downloads is discarded
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
