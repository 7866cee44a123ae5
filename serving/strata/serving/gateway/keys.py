"""API key authentication against a file with one key per line.

The file's modification time is checked for every request, so keys can be added and removed without a restart (Kubernetes
updates a mounted Secret in place). A missing file rejects every request: the file is configured by name, so its absence is an
error.
"""

import hashlib
from pathlib import Path

from strata.serving.api.requests import ApiError

FILE = "STRATA_API_KEYS_FILE"


class Keys:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = 0
        self._digests: frozenset[bytes] = frozenset()

    def check(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raises a 401 for an unknown key. Digests are compared, so the time of a comparison reveals nothing about a key."""
        sent = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        if scheme.lower() != b"bearer" or _digest(key) not in self._known():
            message = "The API key is missing or unknown. Send the header Authorization: Bearer KEY."
            raise ApiError(401, message, headers={"www-authenticate": "Bearer"})

    def _known(self) -> frozenset[bytes]:
        try:
            changed = self._file.stat().st_mtime_ns
            if changed != self._changed:
                self._digests = frozenset(_digest(key) for key in read(self._file))
                self._changed = changed
        except OSError:
            self._changed, self._digests = 0, frozenset()
        return self._digests


def read(file: Path) -> list[bytes]:
    """Keys in a file, one per line. Raises OSError."""
    return [line.strip() for line in file.read_bytes().splitlines() if line.strip()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key.strip()).digest()
