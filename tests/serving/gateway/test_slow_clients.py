"""Clients that send a request or read an answer too slowly: refused or dropped, and their capacity is free again."""

import asyncio
import contextlib
import json
from typing import Any

import pytest
from gateway_in_process import Gateway, post, run, until

from strata.serving.gateway import app, connection

BODY = b'{"prompt": "x", "max_tokens": 1}'
STREAM = {"prompt": "x", "stream": True, "events": 10**6, "rate": 1500}  # 1.5 MB/s
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
SMALL = 4096


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "UPLOAD_S", 0.6)
    monkeypatch.setattr(connection, "STALLED_S", 0.4)
    monkeypatch.setattr(connection, "LINGER_S", 0.2)


async def trickle(writer: asyncio.StreamWriter, data: bytes, pause_s: float = 0.05) -> None:
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(pause_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        pytest.param(post(b"", length=1000), id="content-length"),
        pytest.param(CHUNKED + b"3e8\r\n", id="chunked"),
        pytest.param(post(b"", "/v1/chat/completions", length=1000), id="chat"),
        pytest.param(post(b"", "/tokenize", length=1000), id="tokenize"),
    ],
)
def test_slow_upload_is_answered_408(short_limits: None, head: bytes) -> None:
    async def test(gateway: Gateway) -> None:
        reader, writer = await gateway.connect(head)
        sending = asyncio.ensure_future(trickle(writer, b" " * 1000))
        await asyncio.sleep(0.1)
        assert (await gateway.complete()).status_code == 200, "an unfinished upload occupies no capacity"
        top, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        sending.cancel()
        assert top.startswith(b"HTTP/1.1 408 Request Timeout") and b"connection: close" in top
        error = json.loads(body)["error"]
        assert error["code"] == 408 and error["type"] == "invalid_request_error" and "was not sent within" in error["message"]
        if b"/v1/" in head:
            assert await gateway.metric('strata_serve_rejections_total{model="tiny",reason="slow-upload"') == 1
        assert gateway.replica.calls == 0

    run(test, capacity=1)


def test_upload_in_parts_within_the_limit_is_answered() -> None:
    async def test(gateway: Gateway) -> None:
        reader, writer = await gateway.connect(post(b"", length=len(BODY)))
        await trickle(writer, BODY, 0.003)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    run(test)


def test_limit_of_an_upload_does_not_end_a_longer_stream(short_limits: None) -> None:
    async def test(gateway: Gateway) -> None:
        answer = await gateway.complete(stream=True, events=12, rate=12)  # 1 s
        assert answer.text.count("data: x") == 12 and answer.text.endswith("data: [DONE]\n\n")

    run(test)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [pytest.param(STREAM, id="stream"), pytest.param({"prompt": "x", "answer": 4 * 2**20}, id="whole")]
)
def test_stalled_reader_is_dropped_and_its_capacity_is_free(short_limits: None, asked: dict[str, Any]) -> None:
    async def test(gateway: Gateway) -> None:
        reader, _ = await gateway.connect(post(asked), SMALL)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 OK")  # and nothing after it
        refused = await gateway.complete()
        assert refused.status_code == 429 and refused.headers["retry-after"]
        async with asyncio.timeout(10):
            while (answer := await gateway.complete()).status_code == 429:
                await asyncio.sleep(0.05)
        assert answer.status_code == 200 and gateway.replica.calls == 0
        if asked is STREAM:
            assert gateway.replica.cancelled == 1, "the replica's call is cancelled"
            assert await gateway.metric("strata_serve_client_disconnects_total") == 1
        rest = b""
        with contextlib.suppress(ConnectionResetError):
            while data := await asyncio.wait_for(reader.read(65536), 5):
                rest += data
        assert not rest.endswith(b"0\r\n\r\n") and len(rest) < 4 * 2**20, "the connection was closed before the end"

    run(test, capacity=1)


@pytest.mark.slow
def test_reader_that_pauses_within_the_limit_receives_everything(short_limits: None) -> None:
    async def test(gateway: Gateway) -> None:
        reader, writer = await gateway.connect(post(STREAM | {"events": 1500}), SMALL)
        await until(lambda: gateway.replica.calls == 1)
        answer, paused_at = b"", 0
        while not answer.endswith(b"0\r\n\r\n"):
            data = await reader.read(65536)
            assert data
            answer += data
            if len(answer) > paused_at + 256 * 2**10:
                paused_at = len(answer)
                await asyncio.sleep(0.15)
        assert answer.count(b"data: xxx") == 1500 and b"data: [DONE]" in answer
        writer.close()

    run(test)
