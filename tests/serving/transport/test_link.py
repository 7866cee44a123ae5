"""Calls over one connection: chunks in order, cancelling, losing the other end, callers without the secret refused."""

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from strata.serving.transport import link
from strata.serving.transport.link import SECRET_BYTES, Call, Kind, Link, LinkLost, Overrun, Server, Stream

SECRET = os.urandom(SECRET_BYTES)


class Replica:
    """Answers `count` with the requested number of chunks, never answers `hang`, fails on `fail`."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.server = Server(self.handle, lambda: {"calls": self.server.calls}, SECRET)

    async def handle(self, call: Call) -> None:
        if call.method == "hang":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if call.method == "fail":
            raise ValueError("no such thing")
        call.head({"asked": call.meta, "body": call.body.decode()})
        for number in range(call.meta["chunks"]):
            call.data(str(number).encode())
            await asyncio.sleep(0)
        call.end({"trailer": "all"})


async def collect(stream: Stream) -> list[tuple[int, bytes]]:
    chunks = [await stream.next()]
    while chunks[-1][0] != Kind.END:
        chunks.append(await stream.next())
    return chunks


def connected(test: Callable[[Replica, Link], Awaitable[None]]) -> None:
    async def run() -> None:
        replica = Replica()
        address = await replica.server.listen("127.0.0.1")
        link = await Link.connect(address, SECRET, lambda _: None)
        await test(replica, link)
        link.close()
        replica.server.close()

    asyncio.run(run())


def test_concurrent_calls_receive_their_own_chunks() -> None:
    async def test(replica: Replica, link: Link) -> None:
        answers = await asyncio.gather(*(collect(link.call("count", {"chunks": n}, b"x" * n)) for n in range(50)))
        for n, chunks in enumerate(answers):
            assert chunks[0][0] == Kind.HEAD and str(n).encode() in chunks[0][1]
            assert [payload for kind, payload in chunks if kind == Kind.DATA] == [str(i).encode() for i in range(n)]
        assert link.calls == replica.server.calls == 0

    connected(test)


def test_large_body_is_complete() -> None:
    async def test(replica: Replica, link: Link) -> None:
        chunks = await collect(link.call("count", {"chunks": 0}, b"y" * 3_000_000))
        assert b"y" * 3_000_000 in chunks[0][1]

    connected(test)


def test_cancelled_call_is_cancelled_at_the_callee() -> None:
    async def test(replica: Replica, link: Link) -> None:
        stream = link.call("hang", {})
        await asyncio.sleep(0.05)
        stream.cancel()
        await asyncio.sleep(0.05)
        assert replica.cancelled == 1 and replica.server.calls == 0

    connected(test)


def test_failed_call_does_not_close_the_link() -> None:
    async def test(replica: Replica, link: Link) -> None:
        with pytest.raises(LinkLost, match="no such thing"):
            await link.call("fail", {}).next()
        assert len(await collect(link.call("count", {"chunks": 1}))) == 3

    connected(test)


def test_closed_server_fails_all_calls() -> None:
    async def test(replica: Replica, link: Link) -> None:
        streams = [link.call("hang", {}) for _ in range(3)]
        await asyncio.sleep(0.05)
        replica.server.close()
        for stream in streams:
            with pytest.raises(LinkLost):
                await stream.next()
        assert not link.alive
        with pytest.raises(LinkLost):
            await link.call("count", {"chunks": 1}).next()

    connected(test)


def test_lost_caller_cancels_its_calls() -> None:
    async def test(replica: Replica, link: Link) -> None:
        link.call("hang", {})
        await asyncio.sleep(0.05)
        link.abort()
        await asyncio.sleep(0.05)
        assert replica.cancelled == 1 and not replica.server.connections

    connected(test)


def test_pings_report_the_load() -> None:
    async def test(replica: Replica, link: Link) -> None:
        link.call("hang", {})
        await asyncio.sleep(0.05)
        link._ping()
        await asyncio.sleep(0.05)
        assert link.load == {"calls": 1}

    connected(test)


def test_caller_with_a_wrong_secret_is_disconnected() -> None:
    async def test(replica: Replica, link: Link) -> None:
        stranger = await Link.connect(link.address, os.urandom(SECRET_BYTES), lambda _: None)
        with pytest.raises(LinkLost):
            await stranger.call("count", {"chunks": 1}).next()
        assert link.alive

    connected(test)


def test_unauthenticated_connections_are_bounded_and_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SECRET_S", 0.1)
    monkeypatch.setattr(link, "PING_S", 0.05)

    async def test(replica: Replica, known: Link) -> None:
        host, _, port = known.address.rpartition(":")
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(link.MAX_UNTRUSTED + 20)]
        await asyncio.sleep(0.05)
        assert len(replica.server.connections) <= link.MAX_UNTRUSTED + 1
        await asyncio.sleep(0.4)
        assert len(replica.server.connections) == 1
        for _, writer in strangers:
            writer.close()
        assert len(await collect(known.call("count", {"chunks": 1}))) == 3

    connected(test)


@pytest.mark.slow
def test_caller_without_pings_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE_S", 0.2)
    monkeypatch.setattr(link, "PING_S", 0.05)

    async def test(replica: Replica, known: Link) -> None:
        known.call("hang", {})
        await asyncio.sleep(0.4)
        assert replica.server.calls == 1, "it sends pings"
        assert known._pinging is not None
        known._pinging.cancel()
        await asyncio.sleep(0.5)
        assert replica.cancelled == 1 and not replica.server.connections

    connected(test)


def test_oversized_frame_closes_the_connection() -> None:
    async def test(replica: Replica, known: Link) -> None:
        assert known._transport is not None
        known._transport.write(link.FRAME.pack(0xFFFFFFFF, 1, Kind.CALL))
        await asyncio.sleep(0.1)
        assert not known.alive and not replica.server.connections

    connected(test)


def test_unread_stream_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "UNREAD_BYTES", 1000)

    async def test(replica: Replica, known: Link) -> None:
        stream = known.call("count", {"chunks": 100_000})
        other = known.call("count", {"chunks": 3})
        assert len(await collect(other)) == 5
        while replica.server.calls:
            await asyncio.sleep(0.01)
        with pytest.raises(Overrun):
            await collect(stream)
        assert known._unread == 0 and not known._lagging
        assert len(await collect(known.call("count", {"chunks": 100}))) == 102, "one that is taken goes on"

    connected(test)


def test_most_lagging_stream_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "UNREAD_OF_LINK_BYTES", 50_000)
    monkeypatch.setattr(link, "LARGE_BYTES", 100)

    async def test(replica: Replica, known: Link) -> None:
        slow = [known.call("count", {"chunks": chunks}) for chunks in (1000, 100_000, 1000)]
        await asyncio.sleep(0.1)
        while replica.server.calls:
            await asyncio.sleep(0.01)
        assert len(await collect(slow[0])) == len(await collect(slow[2])) == 1002
        with pytest.raises(Overrun):
            await collect(slow[1])
        assert known._unread == 0 and not known._lagging

    connected(test)


def test_background_call_is_no_load_and_ends_with_the_link() -> None:
    async def test(replica: Replica, link: Link) -> None:
        background, work = link.call("hang", {}, background=True), link.call("hang", {})
        while replica.server.calls != 1:
            await asyncio.sleep(0.01)
        assert link.calls == 1
        work.cancel()
        while replica.cancelled != 1:
            await asyncio.sleep(0.01)
        assert link.calls == replica.server.calls == 0
        background.cancel()
        while replica.cancelled != 2:
            await asyncio.sleep(0.01)
        assert link.calls == replica.server.calls == 0, "it is not subtracted twice"
        left = link.call("hang", {}, background=True)
        link.close()
        with pytest.raises(LinkLost):
            await left.next()
        assert link.calls == 0

    connected(test)
