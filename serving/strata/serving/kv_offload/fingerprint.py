"""Digest of everything that decides the content of a KV block besides its tokens.

vLLM's file names have the model's path, dtype and block size. A folder whose weights were replaced has the same path.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 4


def of(folders: Iterable[str], settings: Mapping[str, object]) -> str:
    """Reads all files of the folders: about a second per GiB and thread. Raises OSError."""
    files = sorted({file for folder in folders for file in Path(folder).iterdir() if file.is_file()})
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(_digest, files))
    content = sorted((file.name, digest) for file, digest in zip(files, digests, strict=True))
    whole = json.dumps([content, settings], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
