"""Where Strata keeps things, and writes that a kill cannot leave half done."""

import os
import tempfile
from pathlib import Path


def home() -> Path:
    """Runs and caches live under one folder: the working directory, or STRATA_HOME."""
    return Path(os.environ.get("STRATA_HOME", ".")).resolve()


def cache_dir() -> Path:
    return home() / ".strata"


def write_atomic(path: Path, content: str | bytes) -> None:
    """A reader sees the old file or the new one, never a part: the rename is atomic within a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(handle, 0o644)  # mkstemp makes it the owner's alone
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
