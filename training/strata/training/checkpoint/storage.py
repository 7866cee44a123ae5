"""Folders on local disk or in object storage, by any URI that pyarrow or fsspec supports."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError


@dataclass(frozen=True)
class Folder:
    """Folder on a pyarrow file system, as Ray Train requires; fsspec file systems are wrapped. Names are relative to `path`."""

    filesystem: Any
    path: str

    def __truediv__(self, name: str) -> "Folder":
        return Folder(self.filesystem, f"{self.path}/{name}")

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector

        return sorted(info.base_name for info in self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True)))

    def size(self, name: str) -> int | None:
        """Size of a file in bytes, None if it does not exist."""
        info = self.filesystem.get_file_info(f"{self.path}/{name}")
        return info.size if info.is_file else None

    def written_at(self, name: str) -> float | None:
        """Modification time in Unix seconds, None if the storage has none."""
        nanoseconds = self.filesystem.get_file_info(f"{self.path}/{name}").mtime_ns
        return None if nanoseconds is None else nanoseconds / 1e9

    def read(self, name: str) -> bytes:
        with self.filesystem.open_input_stream(f"{self.path}/{name}") as stream:
            data: bytes = stream.read()
        return data

    def write(self, name: str, data: bytes) -> None:
        """Writes a file atomically."""
        with self.create(f".{name}") as stream:
            stream.write(data)
        self.filesystem.move(f"{self.path}/.{name}", f"{self.path}/{name}")

    def open(self, name: str) -> Any:
        """Opens a file for random access."""
        return self.filesystem.open_input_file(f"{self.path}/{name}")

    def create(self, name: str) -> Any:
        self.filesystem.create_dir(self.path)
        return self.filesystem.open_output_stream(f"{self.path}/{name}")

    def remove(self) -> None:
        from pyarrow.fs import FileType

        if self.filesystem.get_file_info(self.path).type == FileType.Directory:
            self.filesystem.delete_dir(self.path)

    def delete(self, name: str) -> None:
        """Deletes a file if it exists."""
        if self.size(name) is not None:
            self.filesystem.delete_file(f"{self.path}/{name}")

    def rename(self, name: str, to: str) -> None:
        """Renames a subfolder. Moves its files one by one if the storage cannot move folders: S3 has none, and its error is that
        no object has the name of the folder."""
        from pyarrow.fs import LocalFileSystem

        before, after = self / name, self / to
        try:
            self.filesystem.move(before.path, after.path)
        except (NotImplementedError, OSError):
            if isinstance(self.filesystem, LocalFileSystem):
                raise
            self.filesystem.create_dir(after.path)
            for file in before.names():
                self.filesystem.move(f"{before.path}/{file}", f"{after.path}/{file}")
            before.remove()


def folder(target: str | Path) -> Folder:
    """Folder at a local path or a URI."""
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

    if "://" not in str(target):
        return Folder(LocalFileSystem(), str(Path(target).absolute()))
    try:
        filesystem, path = FileSystem.from_uri(str(target))
    except (ArrowInvalid, ValueError):
        from fsspec.core import url_to_fs

        try:
            wrapped, path = url_to_fs(str(target))
        except (ImportError, ValueError) as error:
            raise UserError(f"train.checkpoints={target} cannot be opened: {error}", "Use a URI that fsspec supports.") from error
        filesystem = PyFileSystem(FSSpecHandler(wrapped))
    return Folder(filesystem, path.rstrip("/"))
