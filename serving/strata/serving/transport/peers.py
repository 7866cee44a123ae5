"""The replicas of one kind that this process can call: found in the directory, connected to, dropped when they are gone."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strata.serving.transport.directory import Directory
from strata.serving.transport.link import Link

logger = logging.getLogger("ray.serve")

POLL_S = 0.5


@dataclass(frozen=True)
class Peer:
    name: str
    link: Link
    entry: dict[str, Any]  # what it published about itself

    @property
    def busy(self) -> int:
        """Calls that it works on: those of others, as it said last, and ours, which we know."""
        return self.link.other_calls + self.link.calls

    @property
    def healthy(self) -> bool:
        """Whether its engine was alive when it was asked last, a second ago."""
        return bool(self.link.load.get("healthy", False))


class Peers:
    def __init__(self, directory: Directory, role: str, secret: bytes, poll_s: float = POLL_S) -> None:
        self._directory, self._role, self._secret, self._look_s = directory, role, secret, poll_s
        self._peers: dict[str, Peer] = {}
        self._changed = asyncio.Event()
        self.discovered = False  # before that an empty list says nothing
        self._polling = asyncio.get_running_loop().create_task(self._poll_forever())

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def least_busy(self, without: frozenset[str] = frozenset(), cost: Callable[[Peer], float] | None = None) -> Peer | None:
        """Of those not in `without`, unless there are no others; any of those that are equally busy."""
        usable = [peer for peer in self._peers.values() if not peer.link.ending]
        peers = [peer for peer in usable if peer.name not in without] or usable
        random.shuffle(peers)
        return min(peers, key=cost or (lambda peer: peer.busy), default=None)

    async def changed(self, limit_s: float) -> None:
        """Returns when replicas came or went, or after `limit_s`."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), limit_s)

    async def _poll_forever(self) -> None:
        while True:
            try:
                await self._poll()
                self.discovered = True
            except Exception:
                logger.exception("Looking for %s replicas failed; trying again.", self._role)
            await asyncio.sleep(self._look_s)

    async def _poll(self) -> None:
        names = await self._directory.names(self._role)
        for name in self._peers.keys() - names:
            # It drains, or Serve took it away: no new calls, and the ones under way end by themselves.
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
            # It listened before it published: it is dead. (Alive after all, it publishes again.)
            await self._directory.withdraw(self._role, name)
        except OSError as error:
            logger.warning("The %s replica at %s does not answer: %s", self._role, entry["address"], error)
        else:
            self._peers[name] = Peer(name, link, entry)
            self._changed.set()
