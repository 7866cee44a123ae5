"""Directory of replicas over a key-value store that stands in for Ray's."""

import asyncio

import pytest

from strata.serving.transport.directory import Directory

from . import memory_store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    return memory_store.replace(monkeypatch)


def test_entries_are_published_found_and_withdrawn(store: dict[bytes, bytes]) -> None:
    async def test() -> None:
        one = Directory("one")
        await one.publish("decode", "a", {"address": "x:1"})
        await one.publish("decode", "b", {"address": "x:2"})
        await one.publish("prefill", "c", {})
        assert store[b"serve/one/decode/a"] == b'{"address": "x:1"}'
        assert await one.names("decode") == {"a", "b"} and await one.names("gateway") == set()
        assert await one.entry("decode", "b") == {"address": "x:2"} and await one.entry("decode", "c") is None
        assert await one.entry("prefill", "c") == {}
        await one.withdraw("decode", "a")
        await one.withdraw("decode", "absent")
        assert await one.names("decode") == {"b"}

    asyncio.run(test())


def test_a_new_endpoint_deletes_only_its_own_entries(store: dict[bytes, bytes]) -> None:
    async def test() -> None:
        for name in ("one", "ones"):
            await Directory(name).publish("decode", "a", {})

    asyncio.run(test())
    Directory("one").clear()
    assert list(store) == [b"serve/ones/decode/a"]
