"""The catalogue in the key-value store of Ray's GCS, which outlives any gateway.

One gateway at a time changes it, the leader (`runtime.models.controller`). A change is made to what is stored at that moment, so
that a gateway that has just become the leader loses nothing.
"""

import asyncio
from collections.abc import Callable

from strata.serving.catalogue.document import Catalogue
from strata.serving.transport.directory import Directory

ROLE, NAME = "catalogue", "present"


def directory(endpoint: str) -> Directory:
    """Apart from the endpoint's directory of replicas."""
    return Directory(f"{endpoint}.models")


class Store:
    def __init__(self, endpoint: str) -> None:
        self._directory = directory(endpoint)
        self._changing = asyncio.Lock()

    async def read(self) -> Catalogue | None:
        """None before the first change."""
        found = await self._directory.entry(ROLE, NAME)
        return None if found is None else Catalogue.decode(found["document"].encode())

    async def change(self, make: Callable[[Catalogue], Catalogue]) -> Catalogue:
        """Applies `make`, which may raise and then changes nothing. Returns what is stored."""
        async with self._changing:
            before = await self.read() or Catalogue()
            after = make(before)
            if after is not before:
                await self._directory.publish(ROLE, NAME, {"document": after.encode().decode()})
            return after
