"""Who may use the endpoint: those with a key that is in a file, one a line.

The file is looked at again for every request, so that keys come and go without a restart (Kubernetes changes a mounted
Secret in place). A file that is missing lets nobody in: it is asked for by name, so its absence is a mistake.
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
        """Raises a 401. By digest: how long a comparison takes says nothing about a key."""
        sent = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        if scheme.lower() != b"bearer" or _digest(key) not in self._known():
            message = "This endpoint needs an API key that it knows: Authorization: Bearer KEY."
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
    """The keys of a file, one a line. Raises OSError."""
    return [line.strip() for line in file.read_bytes().splitlines() if line.strip()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key.strip()).digest()
