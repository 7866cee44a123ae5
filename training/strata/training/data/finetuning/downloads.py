"""Files behind an fsspec URI, downloaded once per version into the cache."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError, shown
from strata.platform.files import cache_dir
from strata.training.data.digests import writable


def download(uri: str, key: str) -> tuple[list[Path], bool]:
    """Local files of a URI, and whether it names a single file. A file is downloaded again if the storage reports another size,
    time or tag for it."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    fix = f"Check {key}.uri, the credentials and the network."
    try:
        filesystem, root = fsspec.core.url_to_fs(uri)
        names, alone = _names(filesystem, root)
        if isinstance(filesystem, LocalFileSystem):
            return [Path(name) for name in names], alone
        return [_one(filesystem, name) for name in names], alone
    except UserError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise UserError(
            f"{key}.uri={shown(uri, 200)} cannot be read: {shown(error, 200) or type(error).__name__}.", fix
        ) from None


def _names(filesystem: Any, root: str) -> tuple[list[str], bool]:
    if any(character in root for character in "*?["):
        return sorted(name for name in filesystem.glob(root) if filesystem.isfile(name)), False
    if filesystem.isdir(root):
        inside = (name for name in filesystem.find(root))
        return sorted(name for name in inside if not name.rsplit("/", 1)[-1].startswith(".")), False
    if not filesystem.exists(root):
        raise FileNotFoundError(f"{root} does not exist")
    return [root], True


def _one(filesystem: Any, name: str) -> Path:
    version = filesystem.ukey(name)
    folder = hashlib.blake2b(f"{filesystem.protocol} {name} {version}".encode(), digest_size=10).hexdigest()
    path: Path = cache_dir() / "downloads" / folder / name.rsplit("/", 1)[-1]
    if path.is_file():
        return path
    with writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".download-")
        os.close(handle)
    try:
        filesystem.get_file(name, temporary)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path
