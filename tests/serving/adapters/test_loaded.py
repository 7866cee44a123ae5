"""Adapters in an engine's memory: loads, evictions and removals, with an engine that stands in."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from strata.platform.errors import UserError
from strata.serving.adapters import folder
from strata.serving.adapters.entry import Entry
from strata.serving.adapters.loaded import UNLISTED_S, Loaded

from . import peft_folder


@dataclass
class Engine:
    """vLLM's side: adapters by number, of which it holds a limited number."""

    in_memory: int
    held: dict[int, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    pause_s: float = 0.0
    now: float = 0.0

    async def add(self, entry: Entry, number: int) -> None:
        await asyncio.sleep(self.pause_s)
        self.held[number] = entry.name
        assert len(self.held) <= self.in_memory, "vLLM would evict one by itself"

    async def remove(self, number: int) -> None:
        await asyncio.sleep(self.pause_s)
        del self.held[number]

    def adapters(self, loaded: int, waiting: int) -> None: ...

    def adapter_loaded(self, seconds: float) -> None:
        self.log.append("loaded")

    def adapter_evicted(self, reason: str) -> None:
        self.log.append(reason)

    @property
    def names(self) -> set[str]:
        return set(self.held.values())


@pytest.fixture
def entries(tmp_path: Path) -> dict[str, Entry]:
    found = {}
    for name in "abcdef":
        path = peft_folder.adapter(tmp_path / name, fill=name.encode())
        found[name] = Entry(name, str(path), folder.revision(path), 4)
    return found


def run(test: Callable[[Engine, Loaded], Awaitable[None]], slots: int = 1, in_memory: int = 2) -> None:
    async def begin() -> None:
        engine = Engine(in_memory)
        loaded = Loaded(engine.add, engine.remove, slots, in_memory, engine, lambda: engine.now)
        async with asyncio.timeout(20):
            await test(engine, loaded)

    asyncio.run(begin())


def test_the_first_request_loads_and_the_least_recently_used_idle_adapter_is_evicted(entries: dict[str, Entry]) -> None:
    async def test(engine: Engine, loaded: Loaded) -> None:
        for name in "abab":
            async with loaded.used(entries[name]) as number:
                assert engine.held[number] == name
        assert engine.log == ["loaded", "loaded"]
        async with loaded.used(entries["c"]):
            assert engine.names == {"b", "c"}
        assert engine.log[2:] == ["memory", "loaded"] and loaded.report()["adapters"] == [
            entries["b"].engine_name,
            entries["c"].engine_name,
        ]

    run(test)


def test_an_adapter_with_a_request_is_never_evicted(entries: dict[str, Entry]) -> None:
    async def test(engine: Engine, loaded: Loaded) -> None:
        async with AsyncExitStack() as open_:
            for name in "ab":
                await open_.enter_async_context(loaded.used(entries[name]))
            assert not await loaded.load(entries["c"])
            third = asyncio.ensure_future(open_.enter_async_context(loaded.used(entries["c"])))
            await asyncio.sleep(0.05)
            assert engine.names == {"a", "b"} and not third.done()
            third.cancel()
            await asyncio.wait({third})
        assert await loaded.load(entries["c"]) and engine.names == {"b", "c"}

    run(test, slots=2)


def test_many_requests_for_many_adapters_at_once(entries: dict[str, Entry]) -> None:
    async def test(engine: Engine, loaded: Loaded) -> None:
        engine.pause_s = 0.002
        running = set[str]()

        async def ask(name: str) -> None:
            async with loaded.used(entries[name]) as number:
                running.add(name)
                await asyncio.sleep(0.002)
                assert engine.held[number] == name
                running.discard(name)

        tasks = [asyncio.ensure_future(ask(name)) for name in "abcdef" * 10]
        for task in tasks[::7]:
            asyncio.get_running_loop().call_later(0.01, task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert len(engine.held) <= 3 and len(engine.held) == len(loaded.report()["adapters"])

    run(test, slots=2, in_memory=3)


def test_a_load_outlives_the_request_that_began_it(entries: dict[str, Entry]) -> None:
    async def test(engine: Engine, loaded: Loaded) -> None:
        engine.pause_s = 0.05
        asked = asyncio.ensure_future(AsyncExitStack().enter_async_context(loaded.used(entries["a"])))
        await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.wait({asked})
        assert await loaded.load(entries["a"]) and engine.names == {"a"} and engine.log == ["loaded"]

    run(test)


def test_a_folder_that_changed_is_refused(entries: dict[str, Entry]) -> None:
    async def test(engine: Engine, loaded: Loaded) -> None:
        peft_folder.adapter(Path(entries["a"].folder), fill=b"x")
        with pytest.raises(UserError, match="has changed since"):
            async with loaded.used(entries["a"]):
                pass
        async with loaded.used(entries["b"]):
            assert engine.names == {"b"}

    run(test)


def test_replicas_follow_the_directory(entries: dict[str, Entry]) -> None:
    async def test(engine: Engine, loaded: Loaded) -> None:
        await loaded.follow([entries["a"], entries["b"], entries["c"]])
        assert engine.names == {"a", "b"}  # as far as there is memory
        async with loaded.used(entries["a"]):
            await loaded.follow([entries["c"]])
            assert engine.names == {"a", "c"}  # a stream runs
        await loaded.follow([entries["c"]])
        assert engine.names == {"c"} and engine.log.count("removed") == 2
        await loaded.load(entries["d"])  # about to be listed
        await loaded.follow([entries["c"]])
        assert engine.names == {"c", "d"}
        engine.now += UNLISTED_S + 1
        await loaded.follow([entries["c"]])
        assert engine.names == {"c"}

    run(test)
