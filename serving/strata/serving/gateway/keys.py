"""API key authentication against a file of tenants (`tenants.file`), or one with one key per line.

In the second form, lines that begin with `#` are comments, and each key is a tenant of its own without limits.

The file's status is checked for every request, so keys can be added and removed without a restart (Kubernetes updates a mounted
Secret in place). While the file is missing, unreadable or empty, every request is rejected: the file is configured by name, so
its absence is an error. A file of tenants with wrong content is not applied: the last good content stays valid. The log has one
line per outage or wrong content.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from strata.serving.api.requests import ApiError
from strata.serving.tenants import file as tenants_file
from strata.serving.tenants.file import Content, Known, WrongContent
from strata.serving.tenants.tenant import Caller, Tenant, digest, short_id

logger = logging.getLogger("ray.serve")

FILE = "STRATA_API_KEYS_FILE"
NOBODY = Content()


class Keys:
    def __init__(self, file: Path, secret: bytes = b"", wall: Callable[[], float] = time.time) -> None:
        """`secret` is that of the endpoint, from which the key of its own starter is derived; empty: there is no such key."""
        self._file, self._wall = file, wall
        self._own = digest(own_key(secret).encode()) if secret else None
        # Modification time, size and inode: a copy that preserves the time differs in another. None: nothing was read.
        self._version: tuple[int, int, int] | None = None
        self._content = NOBODY
        self._fault = ""  # the reason why there are no keys or old ones, as logged

    def check(self, headers: list[tuple[bytes, bytes]]) -> Caller | None:
        """Returns the tenant that sends a request, None for the endpoint's starter. Raises a 401 for an unknown key. Keys are
        found by their digest, so the time of the search reveals nothing about a key."""
        sent = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        if scheme.lower() == b"bearer":
            found = digest(key.strip())
            if self._own is not None and hmac.compare_digest(found, self._own):
                return None
            known = self._known().keys.get(found)
            if known is not None and (known.expires is None or self._wall() < known.expires):
                return Caller(known.tenant, known.key)
        message = "The API key is missing or unknown. Send the header Authorization: Bearer KEY."
        raise ApiError(401, message, headers={"www-authenticate": "Bearer"})

    def tenant(self, name: str) -> Tenant | None:
        """Tenant with a key that is valid now."""
        now = self._wall()
        known = (each for each in self._known().keys.values() if each.tenant.name == name)
        return next((each.tenant for each in known if each.expires is None or now < each.expires), None)

    def lend_idle(self) -> bool:
        return self._content.lend_idle

    def _known(self) -> Content:
        try:
            status = self._file.stat()
            version = (status.st_mtime_ns, status.st_size, status.st_ino)
            if version != self._version:
                self._content = parse(self._file.read_bytes(), self._file)
                self._version = version
                self._log_once("" if self._content.keys else "has no key", "Every request is rejected until it has a key.")
        except OSError as error:
            self._version, self._content = None, NOBODY
            self._log_once(f"cannot be read: {error.strerror}", "Every request is rejected until it has a key.")
        except WrongContent as error:
            self._version = version
            self._log_once(f"is wrong in {error}", "Its last good content stays valid.")
        return self._content

    def _log_once(self, fault: str, effect: str) -> None:
        if fault and fault != self._fault:
            logger.error("The API key file %s %s. %s", self._file, fault, effect)
        self._fault = fault


def parse(data: bytes, file: Path) -> Content:
    """Content of a key file in either form. Raises WrongContent."""
    if tenants_file.is_tenants(data, file):
        return tenants_file.parse(data)
    found: dict[bytes, Known] = {}
    for key in _lines(data):
        name = digest(key)
        found[name] = Known(Tenant(f"key-{short_id(name)}"), short_id(name))
    return Content(found, lend_idle=True)


def read(file: Path) -> list[bytes]:
    """Keys of a file with one per line; none of a file of tenants, which has only hashes. Raises OSError."""
    data = file.read_bytes()
    return [] if tenants_file.is_tenants(data, file) else _lines(data)


def _lines(data: bytes) -> list[bytes]:
    lines = (line.strip() for line in data.splitlines())
    return [line for line in lines if line and not line.startswith(b"#")]


def own_key(secret: bytes) -> str:
    """Key with which the starter of an endpoint warms it up."""
    return hmac.new(secret, b"starter's key", hashlib.sha256).hexdigest()
