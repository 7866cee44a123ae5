"""OpenAI's images API over HTTP, with stand-in workers in the process of the test."""

import asyncio
import base64
import io
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from rich.console import Console

from strata.serving import ask_pictures
from strata.serving.api.headers import DEADLINE
from strata.serving.runtime.endpoint import Endpoint as Served
from strata.serving.transport.link import Server

from .stand_in_workers import SECRET, Endpoint, Plan, endpoint, until
from .test_picture_requests import HOSTILE


def run(test: Callable[[Endpoint], Awaitable[None]], *plans: Plan, **options: Any) -> None:
    async def inside() -> None:
        async with endpoint(*(plans or (Plan(),)), **options) as here:
            await asyncio.wait_for(test(here), 30)

    asyncio.run(inside())


def image(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data)))


def client_of(here: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="k", max_retries=0)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Events of a stream. Asserts that the name of each is its type."""
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        tree = json.loads(data.removeprefix("data: "))
        assert name == f"event: {tree['type']}"
        found.append(tree)
    return found


def test_official_client_generates() -> None:
    async def test(here: Endpoint) -> None:
        answer = await client_of(here).images.generate(
            model="tiny", prompt="a red circle", n=2, size="64x32", extra_body={"seed": 7}
        )
        assert answer.data is not None and len(answer.data) == 2 and answer.size == "64x32" and answer.quality == "medium"
        for index, one in enumerate(answer.data):
            assert one.b64_json is not None and one.url is None and one.model_extra == {"seed": 7 + index}
            made = image(one.b64_json)
            assert made.format == "PNG" and made.size == (64, 32) and np.asarray(made).flat[0] == 7 + index
        assert answer.usage is not None and answer.usage.input_tokens == 3 and answer.usage.total_tokens == 3 + 2 * 16 * 8
        assert answer.usage.output_tokens == 2 * 16 * 8 and answer.output_format == "png" and answer.background == "opaque"

    run(test)


def test_official_client_streams() -> None:
    async def test(here: Endpoint) -> None:
        stream = await client_of(here).images.generate(
            prompt="a red circle", stream=True, partial_images=2, extra_body={"steps": 6, "seed": 1}
        )
        seen = [event async for event in stream]
        assert [event.type for event in seen] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
        assert [event.partial_image_index for event in seen[:2]] == [0, 1]  # type: ignore[union-attr]
        assert all(image(event.b64_json).size == (32, 32) and event.size == "32x32" for event in seen)
        # The stand-in's partial pictures count the steps that are left.
        assert [np.asarray(image(event.b64_json)).flat[0] for event in seen] == [1 + 4, 1 + 2, 1]
        assert seen[2].usage.output_tokens == 64 and seen[2].quality == "medium"  # type: ignore[union-attr]

    run(test)


def test_progress_is_sent_on_request_only() -> None:
    async def test(here: Endpoint) -> None:
        plain = events(await here.create(stream=True, steps=3))
        assert [each["type"] for each in plain] == ["image_generation.completed"]
        full = events(await here.create(stream=True, steps=3, progress=True, n=2, partial_images=1))
        for index in range(2):
            mine = [each for each in full if each["index"] == index]
            assert [each["type"].removeprefix("image_generation.") for each in mine] == [
                "progress", "partial_image", "progress", "progress", "completed"
            ]  # fmt: skip
            assert [(each["step"], each["steps"]) for each in mine if "step" in each] == [(1, 3), (2, 3), (3, 3)]
            assert mine[-1]["seed"] == 7 + index

    run(test)


@pytest.mark.parametrize("format_", ["jpeg", "webp", "png"])
def test_output_formats(format_: str) -> None:
    async def test(here: Endpoint) -> None:
        answer = (await here.create(output_format=format_)).json()
        assert answer["output_format"] == format_ and image(answer["data"][0]["b64_json"]).format == format_.upper()

    run(test)


def test_hostile_bodies_are_refused_and_the_endpoint_lives() -> None:
    raw = [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": NaN}', None),
        (b'{"prompt": "x", "seed": 123456789012345678901234567890}', "seed"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"prompt": "x", "user": {"a": 1}}', "user"),
    ]

    async def test(here: Endpoint) -> None:
        finite = [(param, body) for param, body in HOSTILE if body.get("guidance") not in (math.inf, math.nan)]
        bodies = [(json.dumps({"prompt": "x"} | body).encode(), param) for param, body in finite]
        assert len(bodies) > 50
        for body, param in [*raw, *bodies]:
            answer = await here.client.post("/v1/images/generations", content=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["type"] == "invalid_request_error" and error["code"] == 400, body[:80]
            assert param is None or error["param"] == param, body[:80]
        assert (await here.create()).status_code == 200

    run(test, max_pictures=4, max_steps=60, max_pixels=48 * 64)


def test_routes_models_and_methods() -> None:
    async def test(here: Endpoint) -> None:
        get = here.client.get
        card = (await get("/v1/models")).json()["data"][0]
        assert card["id"] == "tiny" and "max_model_len" not in card
        assert (await get("/v1/models/tiny")).json()["object"] == "model" and (await get("/ready")).status_code == 200
        assert (await here.create(model="other")).status_code == 404
        for method, path, status in (
            ("GET", "/v1/images/generations", 405),
            ("POST", "/v1/completions", 404),
            ("POST", "/tokenize", 404),
            ("POST", "/v1/images/edits", 404),
            ("GET", "/v1/images/generations/some-id", 405),
            ("DELETE", "/v1/images/generations/some-id", 404),
            ("DELETE", "/v1/images/generations/", 404),
        ):
            assert (await here.client.request(method, path)).status_code == status, (method, path)
        document = (await get("/openapi.json")).json()
        assert set(document["paths"]) >= {"/v1/images/generations", "/v1/images/generations/{id}", "/v1/models"}
        assert "/v1/completions" not in document["paths"]
        for reference in {word for word in json.dumps(document).split('"') if word.startswith("#/components/schemas/")}:
            assert reference.rpartition("/")[2] in document["components"]["schemas"]

    run(test)


def test_more_pictures_than_the_queue_holds_get_429() -> None:
    async def test(here: Endpoint) -> None:
        plan.held = asyncio.Event()
        running = asyncio.ensure_future(here.create(n=2))
        await until(lambda: bool(plan.batches))
        refused = await here.create(n=2)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        plan.held.set()
        assert (await running).status_code == 200 and (await here.create(n=2)).status_code == 200

    plan = Plan()
    run(test, plan, capacity=3)


def test_too_large_bodies_get_413() -> None:
    async def test(here: Endpoint) -> None:
        assert (await here.create(user="x" * (17 * 2**20))).status_code == 413

    run(test)


def test_disconnect_stops_sampling_within_a_step() -> None:
    async def test(here: Endpoint) -> None:
        async with here.client.stream(
            "POST", "/v1/images/generations", json={"prompt": "x", "steps": 90, "stream": True, "progress": True}
        ) as response:
            async for line in response.aiter_lines():
                if '"step": 3' in line:
                    break
        await until(lambda: plan.cancelled == [1])
        seen = plan.steps
        assert (await here.create(steps=2)).status_code == 200
        assert plan.steps <= seen + 1 + 2

    plan = Plan(step_s=0.01)
    run(test, plan)


@pytest.mark.parametrize("stream", [False, True])
def test_cancellation_by_id_is_the_owners(stream: bool) -> None:
    async def test(here: Endpoint) -> None:
        mine = {"x-request-id": "my-id", "authorization": "Bearer mine"}
        running = asyncio.ensure_future(here.create(mine, steps=90, stream=stream, progress=stream))
        await until(lambda: plan.steps >= 2)
        url = "/v1/images/generations/my-id"
        assert (await here.client.delete(url, headers={"authorization": "Bearer other"})).status_code == 404
        assert plan.cancelled == []
        gone = await here.client.delete(url, headers={"authorization": "Bearer mine"})
        assert gone.status_code == 200 and gone.json()["cancelled"] is True
        answer = await running
        if stream:
            assert answer.status_code == 200 and '"The request was cancelled."' in answer.text
        else:
            assert answer.status_code == 409 and answer.headers["x-request-id"] == "my-id"
        await until(lambda: plan.cancelled == [1])
        assert (await here.client.delete(url, headers={"authorization": "Bearer mine"})).status_code == 404

    plan = Plan(step_s=0.01)
    run(test, plan)


def test_cancellation_reaches_other_gateways() -> None:
    async def test(here: Endpoint) -> None:
        asked = []

        async def other(call: Any) -> None:
            asked.append((call.method, call.meta["name"]))
            call.end({"found": 1})

        server = Server(other, dict, SECRET)
        here.app._gateways._directory.entries["gateway"] = {"g-2": await server.listen("127.0.0.1")}  # type: ignore[attr-defined]
        await until(lambda: bool(here.app._gateways.all()))
        assert (await here.client.delete("/v1/images/generations/there")).status_code == 200
        assert asked == [("cancel", "there")]
        server.close()

    run(test)


def test_deadline_ends_a_request() -> None:
    async def test(here: Endpoint) -> None:
        late = await here.create({DEADLINE: "0.05"}, steps=90)
        assert late.status_code == 504 and DEADLINE in late.json()["error"]["message"]
        await until(lambda: plan.cancelled == [1])
        assert (await here.create({DEADLINE: "20"}, steps=2)).status_code == 200
        for wrong in ("0", "-1", "soon", "nan", "inf", ""):
            refused = await here.create({DEADLINE: wrong})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == DEADLINE, wrong

    plan = Plan(step_s=0.01)
    run(test, plan)


def test_request_of_a_lost_replica_is_made_by_another() -> None:
    async def test(here: Endpoint) -> None:
        plans[0].held = plans[1].held = asyncio.Event()
        running = asyncio.ensure_future(here.create())
        await until(lambda: any(plan.batches for plan in plans))
        lost = 0 if plans[0].batches else 1
        here.replicas[lost].close()
        await until(lambda: bool(plans[1 - lost].batches))
        plans[0].held.set()
        answer = await running
        assert answer.status_code == 200 and np.asarray(image(answer.json()["data"][0]["b64_json"])).flat[0] == 7

    plans = Plan(), Plan()
    run(test, *plans)


def test_replica_whose_workers_do_not_start_again_gets_no_more_requests() -> None:
    async def test(here: Endpoint) -> None:
        for plan in plans:
            plan.losses, plan.failing_starts = [1], 100
        running = asyncio.ensure_future(here.create())
        await until(lambda: any(plan.batches for plan in plans))
        broken, sound = plans if plans[0].batches else reversed(plans)
        sound.losses, sound.failing_starts = [], 0
        assert (await running).status_code == 200
        for _ in range(6):
            assert (await here.create()).status_code == 200
        assert len(broken.batches) == 1 and len(sound.batches) == 7

    plans = Plan(step_s=0.02), Plan(step_s=0.02)
    run(test, *plans)


def test_asking_writes_files(own_home: Path) -> None:
    async def test(here: Endpoint) -> None:
        served, console = Served(here.url, "tiny", {}), Console(file=io.StringIO(), width=200)
        await asyncio.to_thread(ask_pictures.ask, served, ["a Red circle!", "../x"], console)
        for name in ("a-red-circle.png", "x.png"):
            file = own_home / "pictures" / name
            assert Image.open(file).size == (32, 32) and str(file) in console.file.getvalue()  # type: ignore[attr-defined]
        assert "steps/s" in console.file.getvalue()  # type: ignore[attr-defined]

    run(test)


def test_stream_of_a_lost_replica_continues_without_the_completed_pictures() -> None:
    async def test(here: Endpoint) -> None:
        lines: list[dict[str, Any]] = []

        async def read() -> None:
            tree = {"prompt": "x", "seed": 7, "steps": 2, "n": 2, "stream": True}
            async with here.client.stream("POST", "/v1/images/generations", json=tree) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        lines.append(json.loads(line.removeprefix("data: ")))

        running = asyncio.ensure_future(read())
        await until(lambda: len(lines) == 1)
        first = 0 if plans[0].batches else 1
        plans[first].held = asyncio.Event()  # the second batch of the request
        await until(lambda: len(plans[first].batches) == 2)
        here.replicas[first].close()
        await running
        assert sorted((each["index"], each["seed"]) for each in lines) == [(0, 7), (1, 8)]
        assert [[each.seed for each in batch.pictures] for batch in plans[1 - first].batches] == [[8]]

    plans = Plan(step_s=0.02), Plan(step_s=0.02)
    run(test, *plans, max_batch=1)
