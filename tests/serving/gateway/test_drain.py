"""Shutdown of a gateway and of a replica: running requests end, new ones are refused, and the deadline is Ray Serve's."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_in_process import Gateway, post, run, until

from strata.platform import recipe_file
from strata.serving.gateway import connection
from strata.serving.runtime import app
from strata.serving.runtime.gateway_replica import GatewayReplica
from strata.serving.spec import EngineSpec, GatewaySpec, Network


class Presence:
    """Registration of the gateway in the directory."""

    def __init__(self) -> None:
        self.ended = False

    async def end(self) -> None:
        self.ended = True


def stop(gateway: Gateway) -> tuple[asyncio.Future[None], Presence]:
    """Starts the shutdown that Ray Serve requests of a gateway replica."""
    presence = Presence()
    parts = {"_http": gateway.server, "_serving": gateway.serving, "_presence": presence, "_reporting": None, "_at_end": []}
    parts |= {"_batches": None}
    replica: Any = SimpleNamespace(**parts)
    return asyncio.ensure_future(GatewayReplica.__del__(replica)), presence


async def refused(gateway: Gateway) -> bool:
    try:
        _, writer = await gateway.connect()
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


def test_running_requests_end_and_new_connections_are_refused() -> None:
    async def test(gateway: Gateway) -> None:
        stream = asyncio.ensure_future(gateway.complete(stream=True, events=20, rate=20))
        await until(lambda: gateway.replica.calls == 1)
        ending, presence = stop(gateway)
        async with asyncio.timeout(5):
            while not await refused(gateway):
                await asyncio.sleep(0.02)
        assert not stream.done() and not ending.done() and not presence.ended
        answer = await stream
        assert answer.text.count("data: x") == 20 and answer.text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(ending, 5)
        assert presence.ended and gateway.replica.cancelled == 0

    run(test)


def test_connection_closes_after_its_running_request() -> None:
    async def test(gateway: Gateway) -> None:
        reader, writer = await gateway.connect(post({"prompt": "x", "stream": True, "events": 10, "rate": 20}))
        await until(lambda: gateway.replica.calls == 1)
        ending, _ = stop(gateway)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"0\r\n\r\n")
        await asyncio.wait_for(ending, 5)
        writer.close()

    run(test)


def test_request_sent_during_a_drain_does_not_cost_the_running_answer() -> None:
    async def test(gateway: Gateway) -> None:
        reader, writer = await gateway.connect(post({"prompt": "x", "stream": True, "events": 10, "rate": 20}))
        await until(lambda: gateway.replica.calls == 1)
        ending, _ = stop(gateway)
        answer = b""
        while part := await asyncio.wait_for(reader.read(4096), 10):
            answer += part
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"0\r\n\r\n")
        await asyncio.wait_for(ending, 5)
        writer.close()

    run(test)


def test_idle_and_incomplete_connections_do_not_delay_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.3)

    async def test(gateway: Gateway) -> None:
        incomplete = b"POST /v1/completions HTTP/1.1\r\nx-a: "
        after_an_answer = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        idle = [await gateway.connect(data) for data in (b"", incomplete, after_an_answer)]
        assert await idle[-1][0].readuntil(b"success")
        ending, presence = stop(gateway)
        await asyncio.wait_for(ending, 5)
        assert presence.ended
        assert [await asyncio.wait_for(reader.read(), 5) for reader, _ in idle] == [b"", b"", b""]

    run(test)


def test_deadline_is_that_of_every_deployment() -> None:
    """Ray Serve kills a replica that has not ended by then. Its streams continue on another replica, as after any loss."""
    serve, network = recipe_file.load("laptop").serve, Network.within(one_machine=True)
    prefill, decode = (EngineSpec.of(role, serve, Path("model"), "tiny", network) for role in ("prefill", "decode"))
    gateway = app.build(GatewaySpec.of(serve, "tiny", network), prefill, decode)._bound_deployment
    deployments = [gateway, *(engines._bound_deployment for engines in gateway.init_args[1:])]
    assert {one.name: one._deployment_config.graceful_shutdown_timeout_s for one in deployments} == {
        "gateway": 30.0,
        "decode": 30.0,
        "prefill": 30.0,
    }
