"""Replica's side of the directory of adapters: loads what is listed and frees what was removed."""

import asyncio
import logging

from strata.serving.adapters.entry import ROLE, Entry
from strata.serving.adapters.loaded import Loaded
from strata.serving.transport.directory import Directory

logger = logging.getLogger("ray.serve")

POLL_S = 0.5
FIRST_S = 30.0  # to load adapters before a new replica gets requests


class Following:
    def __init__(self, directory: Directory, loaded: Loaded) -> None:
        self._directory, self._loaded = directory, loaded
        self._known: dict[str, Entry] = {}
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Loads the listed adapters, so that the first requests need not wait, and follows the directory from then on."""
        try:
            async with asyncio.timeout(FIRST_S):
                await self._round()
        except Exception:
            logger.exception("The adapters could not be loaded ahead; requests load them.")
        self._task = asyncio.get_running_loop().create_task(self._forever())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _forever(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._round()
                failing = False
            except Exception:  # one line per outage
                if not failing:
                    logger.exception("Following the directory of adapters failed; retrying.")
                failing = True

    async def _round(self) -> None:
        names = await self._directory.names(ROLE)
        self._known = {name: entry for name, entry in self._known.items() if name in names}
        for name in names - self._known.keys():
            if (tree := await self._directory.entry(ROLE, name)) is not None:
                self._known[name] = Entry(**tree)
        await self._loaded.follow(self._known.values())
