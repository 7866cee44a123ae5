"""Connections to the replicas of one role: discovered in the directory, connected, and dropped when lost."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strata.serving.routing import choice
from strata.serving.transport.directory import Directory
from strata.serving.transport.link import Link

logger = logging.getLogger("ray.serve")

POLL_S = 0.5


@dataclass(frozen=True)
class Peer:
    name: str
    link: Link
    entry: dict[str, Any]  # its record in the directory

    @property
    def busy(self) -> int:
        """Calls in progress on the peer: other callers', as of its last pong, plus ours."""
        return self.link.other_calls + self.link.calls

    @property
    def healthy(self) -> bool:
        """True if its engine was alive at the last pong, about a second ago."""
        return bool(self.link.load.get("healthy", False))


class Peers:
    def __init__(
        self,
        directory: Directory,
        role: str,
        secret: bytes,
        poll_s: float = POLL_S,
        joined: Callable[[Peer], None] | None = None,
    ) -> None:
        """`joined` is called with every peer that was connected."""
        self._directory, self._role, self._secret, self._poll_s = directory, role, secret, poll_s
        self._joined = joined
        self._peers: dict[str, Peer] = {}
        self._changed = asyncio.Event()
        self.discovered = False  # whether the directory was read at least once
        self._polling = asyncio.get_running_loop().create_task(self._poll_forever())

    def close(self) -> None:
        """Ends the discovery and the connections."""
        self._polling.cancel()
        for peer in self.all():
            peer.link.close()
        self._peers.clear()

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def least_busy(self, without: frozenset[str] = frozenset(), cost: Callable[[Peer], float] | None = None) -> Peer | None:
        """Least busy peer that is not in `without`; one that is, if there are no others. Ties are broken at random."""
        return choice.least_busy(self.usable(), cost or (lambda peer: peer.busy), without)

    def usable(self) -> list[Peer]:
        """Peers that accept calls."""
        return [peer for peer in self._peers.values() if not peer.link.ending]

    async def changed(self, limit_s: float) -> None:
        """Returns when a replica joined or left, or after `limit_s`."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), limit_s)

    async def _poll_forever(self) -> None:
        while True:
            try:
                await self._poll()
                self.discovered = True
            except Exception:
                logger.exception("Reading the directory of %s replicas failed; retrying.", self._role)
            await asyncio.sleep(self._poll_s)

    async def _poll(self) -> None:
        names = await self._directory.names(self._role)
        for name in self._peers.keys() - names:
            # It drains, or Serve stopped it: no new calls; calls in progress end by themselves.
            del self._peers[name]
            self._changed.set()
        for name in names - self._peers.keys():
            if entry := await self._directory.entry(self._role, name):
                await self._connect(name, entry)

    async def _connect(self, name: str, entry: dict[str, Any]) -> None:
        def lost(link: Link) -> None:
            if name in self._peers and self._peers[name].link is link:
                del self._peers[name]
            self._changed.set()

        try:
            link = await Link.connect(entry["address"], self._secret, lost)
        except ConnectionRefusedError:
            # A replica listens before it publishes, so this one is dead. If it is alive after all, it publishes again.
            await self._directory.withdraw(self._role, name)
        except OSError as error:
            logger.warning("The %s replica at %s does not answer: %s", self._role, entry["address"], error)
        else:
            self._peers[name] = peer = Peer(name, link, entry)
            self._changed.set()
            if self._joined is not None:
                self._joined(peer)
