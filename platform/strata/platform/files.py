"""Folders of Strata on disk, and atomic file writes."""

import os
import tempfile
from pathlib import Path


def home() -> Path:
    """The folder for runs and caches: STRATA_HOME, or the working directory."""
    return Path(os.environ.get("STRATA_HOME", ".")).resolve()


def cache_dir() -> Path:
    return home() / ".strata"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers see the old content or the new, never a part. Rename is atomic within a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(handle, 0o644)  # mkstemp creates it with mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a failed write does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_leftovers(folder: Path, *names: str) -> None:
    """Deletes temporary files of writes to these names that a kill interrupted. The caller is the only writer."""
    for name in names:
        for leftover in folder.glob(f".{name}.*"):
            leftover.unlink(missing_ok=True)
