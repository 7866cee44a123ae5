"""Images through a gateway and a real engine without Ray. `test_real_endpoint.py` has a whole endpoint."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import engine_alone
import httpx
import pytest
from tiny_vision import Reference, data_url, image, message

from strata.serving.gateway import http
from strata.serving.gateway.admission import Admission
from strata.serving.gateway.app import App
from strata.serving.gateway.pool import Pool, Pools
from strata.serving.metrics.telemetry import Gateway as Telemetry
from strata.serving.transport.link import Kind, Link
from strata.serving.transport.peers import Peers

pytestmark = [pytest.mark.rotation, pytest.mark.long, pytest.mark.timeout(900)]

TOKENS = 16
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
Ask = Callable[..., Awaitable[httpx.Response]]


class Directory:
    def __init__(self, address: str) -> None:
        self._address = address

    async def names(self, role: str) -> set[str]:
        return {"a"} if role == "decode" else set()

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return {"address": self._address, "context": 512, "node": "here"}

    async def withdraw(self, role: str, name: str) -> None:
        pass


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    folder = tmp_path_factory.mktemp("model")
    return Reference(folder), folder


@pytest.fixture(scope="module")
def engine(reference: tuple[Reference, Path]) -> Iterator[str]:
    command = [sys.executable, str(Path(engine_alone.__file__)), str(reference[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = next((line.split()[1] for line in process.stdout if line.startswith("port ")), None)
            assert port is not None, "the engine ended"
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def through_a_gateway(engine: str, test: Callable[[Ask], Awaitable[None]]) -> None:
    async def within() -> None:
        directory: Any = Directory(engine)
        decode, others = (Peers(directory, role, engine_alone.SECRET) for role in ("decode", "gateway"))
        pools = Pools(Pool(("tiny",), decode, None, Admission(lambda: 24), Telemetry("tiny", "g")))
        app = App("g", pools, others)
        listener = http.listen("127.0.0.1", 0)
        server = http.server(app)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        async with AsyncExitStack() as stack:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=300))
            while not (server.started and decode.all()):
                await asyncio.sleep(0.01)

            async def ask(*messages: dict[str, Any], **more: Any) -> httpx.Response:
                headers = {"x-strata-explain": "1"}
                return await client.post("/v1/chat/completions", json={"messages": messages} | GREEDY | more, headers=headers)

            await test(ask)
        server.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(within(), 600))


def test_answers_equal_those_of_transformers(reference: tuple[Reference, Path], engine: str) -> None:
    first, second = image(1), image(2, 30, 60)

    async def test(ask: Ask) -> None:
        answers = []
        for pictures in ([first], [second], [first, second], []):
            found = await ask(message("what is it?", *map(data_url, pictures)))
            assert found.status_code == 200, found.text
            answers.append(found.json()["choices"][0]["token_ids"])
            assert answers[-1] == reference[0].tokens("what is it?", pictures, TOKENS), len(pictures)
            if pictures:
                assert json.loads(found.headers["x-strata-explain"])["prefill"] == {"where": "local", "reason": "images"}
        assert answers[0] != answers[1], "a model that does not see would pass"

    through_a_gateway(engine, test)


def test_wrong_images_are_refused_and_the_engine_lives(engine: str) -> None:
    good = data_url(image(5))
    bomb = data_url(image(6).resize((5000, 4000)))
    url = {"type": "image_url", "image_url": {"url": good}}

    def at(address: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": address}}]

    cases: list[tuple[Any, str]] = [
        (at("http://169.254.169.254/x.png"), "fetches no images"),
        (at("file:///etc/passwd"), "fetches no images"),
        ([{"image_url": "http://169.254.169.254/x.png"}], "has no 'image_url'"),
        (at(good[: len(good) // 8 * 4]), ""),  # half of a file
        (at("data:image/png;base64,!"), "base64"),
        (at("data:image/png;base64,AAAA"), "PNG"),
        (at(bomb), "5000 x 4000 pixels"),
        ([url | {"uuid": "known"}], "An image is"),
        ([url] * 9, "At most 8 image"),
        ([{"type": "video_url", "video_url": {"url": good}}], "text and image_url"),
        ([{"type": "image_url", "image_url": good}], "An image is"),
    ]

    async def test(ask: Ask) -> None:
        for content, words in cases:
            found = await ask({"role": "user", "content": content})
            assert found.status_code == 400 and words in found.text, (words, found.status_code, found.text)
        assert (await ask({"role": "user", "content": "<image> <image>"})).status_code in (200, 400)
        assert (await ask(message("hello", good))).status_code == 200

    through_a_gateway(engine, test)


def test_resumed_stream_continues_with_the_same_tokens(reference: tuple[Reference, Path], engine: str) -> None:
    """The call of a gateway whose replica died after five tokens."""
    picture = image(4)
    expected = reference[0].tokens("tell a story", [picture], 40)
    body = {"model": "tiny", "messages": [message("tell a story", data_url(picture))], "stream": True} | GREEDY
    from strata.serving.engine.request_context import unpack_event

    async def within() -> list[int]:
        link = await Link.connect(engine, engine_alone.SECRET, lambda link: None)
        meta = {"request_id": "resumed", "resumed": expected[:5]}
        call = link.call("chat", meta, json.dumps(body | {"max_tokens": 40}).encode())
        found: list[int] = []
        while True:
            kind, payload = await call.next()
            if kind == Kind.DATA:
                found += unpack_event(payload)[1]
            elif kind == Kind.END:
                return found

    assert asyncio.run(asyncio.wait_for(within(), 300)) == expected[5:]
