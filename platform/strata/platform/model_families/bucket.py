"""Model files in object storage, by URI: gs://, s3://, oss:// and what else pyarrow opens.

Credentials are those of the environment: the pod's identity on Google Cloud, AWS_* variables, and OSS_ENDPOINT,
OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET for OSS, which is read through its S3 interface.
"""

import fnmatch
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError, shown

OSS = "oss://"
BLOCK = 2**24
RETRY_S = 60
OSS_VARIABLES = ("OSS_ENDPOINT", "OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET")


def is_uri(source: str) -> bool:
    return "://" in source


class Bucket:
    """A folder of a bucket. Errors of the storage are user errors that name the URI."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        try:
            self._filesystem, path = _open(uri)
        except (OSError, ValueError, ImportError) as error:
            if isinstance(error, UserError):
                raise
            raise self._unreadable(error) from None
        self._path = path.rstrip("/")

    def files(self, patterns: Sequence[str]) -> dict[str, Any]:
        """Files of the folder whose names match a pattern, by name."""
        from pyarrow.fs import FileSelector

        try:
            found = self._filesystem.get_file_info(FileSelector(self._path))
        except OSError as error:
            raise self._unreadable(error) from None
        files = {info.base_name: info for info in found if info.is_file}
        return {name: info for name, info in sorted(files.items()) if any(fnmatch.fnmatch(name, one) for one in patterns)}

    def read(self, name: str, most: int) -> bytes:
        """The first `most` bytes of a file."""
        try:
            with self._filesystem.open_input_stream(f"{self._path}/{name}") as stream:
                data: bytes = stream.read(most)
        except OSError as error:
            raise self._unreadable(error) from None
        return data

    def download(self, files: Sequence[str], folder: Path) -> None:
        for name in files:
            with (folder / name).open("wb") as file:
                for block in self._blocks(name):
                    file.write(block)

    def _blocks(self, name: str) -> Iterator[bytes]:
        try:
            with self._filesystem.open_input_stream(f"{self._path}/{name}") as stream:
                while block := stream.read(BLOCK):
                    yield block
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> UserError:
        fix = "Correct the URI, and give this machine or pod access to the bucket."
        return UserError(f"The model at {shown(self._uri, 200)} cannot be read: {shown(error, 200)}", fix)


def identity(files: dict[str, Any]) -> str:
    """Digest of names, sizes and times: it changes with the model."""
    listed = "".join(f"{name} {info.size} {info.mtime_ns}\n" for name, info in files.items())
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _with_retry_limit(uri: str) -> str:
    """Google's library retries for a quarter of an hour by default, without a message."""
    if not uri.startswith(("gs://", "gcs://")) or "retry_limit_seconds=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}retry_limit_seconds={RETRY_S}"


def _open(uri: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem, S3FileSystem

    if not uri.startswith(OSS):
        filesystem, path = FileSystem.from_uri(_with_retry_limit(uri))
        return filesystem, path
    endpoint, key, secret = (os.environ.get(name) for name in OSS_VARIABLES)
    if not endpoint:
        fix = f"Set {', '.join(OSS_VARIABLES)}, such as OSS_ENDPOINT=oss-cn-hangzhou-internal.aliyuncs.com."
        raise UserError(f"{shown(uri, 200)}: OSS_ENDPOINT is not set.", fix)
    # OSS accepts a bucket's name only in the host's name.
    filesystem = S3FileSystem(access_key=key, secret_key=secret, endpoint_override=endpoint, force_virtual_addressing=True)
    return filesystem, uri.removeprefix(OSS)
