"""Requests in progress by the id that their client gave or was given, so that the client can cancel them.

A request is found by its id and the `Authorization` of its sender: with API keys, no client ends another's requests.
"""

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

Headers = list[tuple[bytes, bytes]]


def owner(headers: Headers) -> str:
    sent = next((value for name, value in headers if name == b"authorization"), b"")
    return hashlib.sha256(sent).hexdigest()


class InProgress:
    def __init__(self) -> None:
        self._requests: dict[tuple[str, str], set[asyncio.Future[None]]] = {}

    @contextmanager
    def entered(self, name: str, headers: Headers) -> Iterator[asyncio.Future[None]]:
        """Yields a future that ends when the request is cancelled. Several requests may have one id."""
        key, cancelled = (owner(headers), name), asyncio.get_running_loop().create_future()
        self._requests.setdefault(key, set()).add(cancelled)
        try:
            yield cancelled
        finally:
            cancelled.cancel()
            self._requests[key].discard(cancelled)
            if not self._requests[key]:
                del self._requests[key]

    def cancel(self, name: str, of: str) -> int:
        """Cancels the requests with this id. Returns their number."""
        found = [future for future in self._requests.get((of, name), ()) if not future.done()]
        for future in found:
            future.set_result(None)
        return len(found)
