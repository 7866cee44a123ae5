"""Adapters of one served model, as a gateway knows them.

The directory has an entry for each adapter, under its name and revision. Every gateway polls it, so an adapter survives the
gateway through which it was added, and replicas. A new revision is published before the old one is withdrawn: the newest entry of
a name is valid, so a name is served at every moment of an update. If two gateways add the same name at once, the later one wins.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from strata.serving.adapters.entry import NAME, ROLE, Entry
from strata.serving.api.requests import ApiError
from strata.serving.transport.directory import Directory
from strata.serving.transport.link import LinkLost
from strata.serving.transport.peers import Peer

logger = logging.getLogger("ray.serve")

INSPECT, LOAD = "adapter-inspect", "adapter-load"  # calls of replicas
POLL_S = 0.5
FIND_S = 5.0  # to look an unknown name up
INSPECT_S = 30.0  # to read a folder
LOAD_S = 60.0  # to load it everywhere
SEED, SEEDED = "seed", "done"  # role and name of the entry that marks the recipe's adapters as published


class Adapters:
    def __init__(
        self,
        directory: Directory,
        replicas: Callable[[], Sequence[Peer]],
        taken: Callable[[], Collection[str]],
        seed: Sequence[Entry] = (),
        poll_s: float = POLL_S,
    ) -> None:
        """`replicas`: those of both pools, which load the adapters. `taken`: names of models. `seed`: the recipe's adapters."""
        self._directory, self._replicas, self._taken = directory, replicas, taken
        self._entries: dict[str, Entry] = {}  # by engine name
        self._by_name: dict[str, Entry] = {}
        self._changing = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._polling = asyncio.get_running_loop().create_task(self._poll_forever(seed, poll_s))

    def close(self) -> None:
        self._polling.cancel()

    def get(self, name: str) -> Entry | None:
        return self._by_name.get(name)

    def all(self) -> list[Entry]:
        return sorted(self._by_name.values(), key=lambda entry: entry.added)

    async def find(self, name: str) -> Entry | None:
        """The adapter, also one that another gateway added a moment ago."""
        if (found := self._by_name.get(name)) is None and NAME.fullmatch(name):
            try:
                async with asyncio.timeout(FIND_S):
                    if self._reading is not None:  # it may have begun before the adapter was added
                        await asyncio.shield(self._reading)
                    await self.read()
            except Exception:
                logger.exception("The directory of adapters cannot be read.")
                raise ApiError(503, f"The model '{name}' cannot be looked up now.", headers={"retry-after": "5"}) from None
            found = self._by_name.get(name)
        return found

    async def add(self, name: str, folder: str, replace: bool = False) -> Entry:
        """Adds an adapter, or with `replace` changes the folder of one. Returns when the replicas that are up have loaded it.
        Adding the same content under the same name again changes nothing. Raises ApiError."""
        self._check_name(name)
        async with self._changing:
            found = await self._inspect(folder)
            entry = Entry(name, found["folder"], found["revision"], found["rank"], time.time())
            await self.read()
            before = self.get(name)
            if before is not None and before.engine_name == entry.engine_name:
                return before
            if before is not None and not replace:
                message = f"The adapter '{name}' is loaded already, from {before.folder}. 'load_inplace' replaces it."
                raise ApiError(400, message, param="lora_name")
            await self._load(entry)
            await self._directory.publish(ROLE, entry.engine_name, entry.tree())
            await self.read()
            await self._withdraw(each for each in list(self._entries.values()) if each.name == name and each.added < entry.added)
        logger.info("Adapter %s was added from %s.", entry.engine_name, entry.folder)
        return entry

    async def remove(self, name: str) -> Entry:
        """Removes an adapter: new requests get 404, streams end normally, and replicas free its memory. Raises ApiError."""
        async with self._changing:
            await self.read()
            entry = self.get(name)
            if entry is None:
                raise ApiError(404, f"There is no adapter '{name}'.", param="lora_name")
            await self._withdraw(each for each in list(self._entries.values()) if each.name == name)
        logger.info("Adapter %s was removed.", entry.engine_name)
        return entry

    async def load_all(self) -> None:
        """Loads every adapter on the replicas, which have new weights. Raises ApiError if one does not fit these."""
        await self.read()
        for entry in self.all():
            try:
                await self._load(entry)
            except ApiError as error:
                raise ApiError(error.status, f"The adapter '{entry.name}' cannot be carried over: {error}") from None

    async def read(self) -> None:
        """Reads the directory. Readers at the same time share one reading."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read())
            self._reading.add_done_callback(self._read_ended)
        await asyncio.shield(self._reading)

    def _read_ended(self, reading: "asyncio.Task[None]") -> None:
        self._reading = None
        if not reading.cancelled():
            reading.exception()  # raised to those who wait; without one it is not an error of the loop

    async def _read(self) -> None:
        names = await self._directory.names(ROLE)
        entries = {name: entry for name, entry in self._entries.items() if name in names}
        for name in names - entries.keys():
            if (tree := await self._directory.entry(ROLE, name)) is not None:
                entries[name] = Entry(**tree)
        self._entries = entries
        self._by_name = {entry.name: entry for entry in sorted(entries.values(), key=lambda entry: entry.added)}

    async def _poll_forever(self, seed: Sequence[Entry], poll_s: float) -> None:
        seeded = not seed
        while True:
            try:
                if not seeded:
                    await self._seed(seed)
                    seeded = True
                await self.read()
            except Exception:
                logger.exception("Reading the directory of adapters failed; retrying.")
            await asyncio.sleep(poll_s)

    async def _seed(self, seed: Sequence[Entry]) -> None:
        """Publishes the recipe's adapters once, so that one that was removed since does not return with a new gateway."""
        if SEEDED not in await self._directory.names(SEED):
            for entry in seed:
                await self._directory.publish(ROLE, entry.engine_name, entry.tree())
            await self._directory.publish(SEED, SEEDED, {})

    async def _withdraw(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            await self._directory.withdraw(ROLE, entry.engine_name)
        await self.read()

    def _check_name(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise ApiError(400, "An adapter's name has letters, digits and . _ : / -, 128 at most.", param="lora_name")
        if name in self._taken():
            raise ApiError(400, f"'{name}' is the name of a model.", param="lora_name")

    async def _inspect(self, folder: str) -> dict[str, Any]:
        """Revision, rank and path of a folder, which a replica reads: gateways may run where the folder is not mounted."""
        for peer in self._up():
            try:
                return await _ask(peer, INSPECT, {"folder": folder}, INSPECT_S)
            except (LinkLost, TimeoutError) as error:
                logger.warning("Replica %s did not read %s: %s", peer.name, folder, error)
        raise ApiError(503, "No engine is up that could load the adapter.", headers={"retry-after": "5"})

    async def _load(self, entry: Entry) -> None:
        """Loads an adapter on every replica. One that is lost or too slow loads it for its first request."""
        up = self._up()
        results = await asyncio.gather(*(_ask(peer, LOAD, entry.tree(), LOAD_S) for peer in up), return_exceptions=True)
        if refusal := next((result for result in results if isinstance(result, ApiError)), None):
            raise refusal
        for peer, result in zip(up, results, strict=True):
            if isinstance(result, BaseException):
                logger.warning("Replica %s has not loaded %s: %s", peer.name, entry.engine_name, result)
        if all(isinstance(result, BaseException) for result in results):
            raise ApiError(503, "No engine could load the adapter.", headers={"retry-after": "5"})

    def _up(self) -> list[Peer]:
        return [peer for peer in self._replicas() if peer.link.alive and not peer.link.ending]


async def _ask(peer: Peer, method: str, meta: dict[str, Any], limit_s: float) -> dict[str, Any]:
    call = peer.link.call(method, meta, background=True)
    try:
        async with asyncio.timeout(limit_s):
            _, payload = await call.next()
    finally:
        call.cancel()
    answer: dict[str, Any] = json.loads(payload)
    if "refused" in answer:
        raise ApiError(400, answer["refused"], param="lora_path")
    return answer
