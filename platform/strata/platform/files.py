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
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a failed write does not say where
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_leftovers(folder: Path, *names: str) -> None:
    """Deletes the temporary files of writes to these names that a kill cut short. The caller is the only writer."""
    for name in names:
        for leftover in folder.glob(f".{name}.*"):
            leftover.unlink(missing_ok=True)
