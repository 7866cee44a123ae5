"""A folder somewhere: on this machine, or behind any URI that pyarrow or fsspec knows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError


@dataclass(frozen=True)
class Folder:
    """Paths in it are relative. pyarrow's file systems are what Ray Train takes; fsspec's are wrapped as one."""

    filesystem: Any
    path: str

    def __truediv__(self, name: str) -> "Folder":
        return Folder(self.filesystem, f"{self.path}/{name}")

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector

        return sorted(info.base_name for info in self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True)))

    def size(self, name: str) -> int | None:
        """None if there is no such file."""
        info = self.filesystem.get_file_info(f"{self.path}/{name}")
        return info.size if info.is_file else None

    def written_at(self, name: str) -> float | None:
        """In Unix seconds; None where the storage does not say."""
        nanoseconds = self.filesystem.get_file_info(f"{self.path}/{name}").mtime_ns
        return None if nanoseconds is None else nanoseconds / 1e9

    def read(self, name: str) -> bytes:
        with self.filesystem.open_input_stream(f"{self.path}/{name}") as stream:
            data: bytes = stream.read()
        return data

    def write(self, name: str, data: bytes) -> None:
        """All of it or, if the writer is killed, nothing."""
        with self.create(f".{name}") as stream:
            stream.write(data)
        self.filesystem.move(f"{self.path}/.{name}", f"{self.path}/{name}")

    def open(self, name: str) -> Any:
        """For reading at any place."""
        return self.filesystem.open_input_file(f"{self.path}/{name}")

    def create(self, name: str) -> Any:
        self.filesystem.create_dir(self.path)
        return self.filesystem.open_output_stream(f"{self.path}/{name}")

    def remove(self) -> None:
        from pyarrow.fs import FileType

        if self.filesystem.get_file_info(self.path).type == FileType.Directory:
            self.filesystem.delete_dir(self.path)

    def delete(self, name: str) -> None:
        """One file, if it is there."""
        if self.size(name) is not None:
            self.filesystem.delete_file(f"{self.path}/{name}")

    def rename(self, name: str, to: str) -> None:
        """A folder in this one. Where the storage cannot move folders, its files are moved one by one."""
        before, after = self / name, self / to
        try:
            self.filesystem.move(before.path, after.path)
        except NotImplementedError:
            self.filesystem.create_dir(after.path)
            for file in before.names():
                self.filesystem.move(f"{before.path}/{file}", f"{after.path}/{file}")
            before.remove()


def folder(target: str | Path) -> Folder:
    """Of a local path or a URI."""
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
            raise UserError(f"train.checkpoints={target} cannot be opened: {error}", "Give a URI that fsspec knows.") from error
        filesystem = PyFileSystem(FSSpecHandler(wrapped))
    return Folder(filesystem, path.rstrip("/"))
