"""API key authentication against a file with one key per line. Lines that begin with `#` are comments.

The file's status is checked for every request, so keys can be added and removed without a restart (Kubernetes updates a mounted
Secret in place). While the file is missing, unreadable or empty, every request is rejected: the file is configured by name, so
its absence is an error. The log has one line per outage.
"""

import hashlib
import logging
from pathlib import Path

from strata.serving.api.requests import ApiError

logger = logging.getLogger("ray.serve")

FILE = "STRATA_API_KEYS_FILE"


class Keys:
    def __init__(self, file: Path) -> None:
        self._file = file
        # Modification time, size and inode: a copy that preserves the time differs in another. None: nothing was read.
        self._version: tuple[int, int, int] | None = None
        self._digests: frozenset[bytes] = frozenset()
        self._fault = ""  # the reason why there are no keys, as logged

    def check(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raises a 401 for an unknown key. Digests are compared, so the time of a comparison reveals nothing about a key."""
        sent = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        if scheme.lower() != b"bearer" or _digest(key) not in self._known():
            message = "The API key is missing or unknown. Send the header Authorization: Bearer KEY."
            raise ApiError(401, message, headers={"www-authenticate": "Bearer"})

    def _known(self) -> frozenset[bytes]:
        try:
            status = self._file.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            if version != self._version:
                self._digests = frozenset(_digest(key) for key in read(self._file))
                self._version = version
                self._log_once("" if self._digests else "has no key")
        except OSError as error:
            self._version, self._digests = None, frozenset()
            self._log_once(f"cannot be read: {error.strerror}")
        return self._digests

    def _log_once(self, fault: str) -> None:
        if fault and fault != self._fault:
            logger.error("The API key file %s %s. Every request is rejected until it has a key.", self._file, fault)
        self._fault = fault


def read(file: Path) -> list[bytes]:
    """Keys in a file, one per line. Raises OSError."""
    lines = (line.strip() for line in file.read_bytes().splitlines())
    return [line for line in lines if line and not line.startswith(b"#")]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key.strip()).digest()
