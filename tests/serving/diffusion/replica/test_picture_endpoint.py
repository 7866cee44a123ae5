"""`strata serve` with a picture model: Ray, a gateway, and one replica with two workers."""

import base64
import concurrent.futures
import io
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
from PIL import Image
from support import STRATA, Served

from strata.platform import ports

from .. import tiny_pictures

pytestmark = pytest.mark.slow
ROUTE = "/v1/images/generations"
SETTINGS = ("serve.pictures.ulysses=2", "serve.pictures.max_batch=4", "serve.pictures.steps=4", "serve.pictures.max_steps=400")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Ends with Ctrl-C while a request is in progress, which is answered."""
    home = tmp_path_factory.mktemp("pictures")
    folder = tiny_pictures.save("own", home / "own")
    held, output = ports.reserve(), home / "serve.out"
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {"STRATA_HOME": str(home)}
    with output.open("wb") as stream:
        command = [STRATA, "serve", "--model", str(folder), f"serve.port={held.port}", *SETTINGS]
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    served = Served(held.url, "own", folder, psutil.Process(process.pid), process, output, held)
    try:
        served.wait_until_ready(150)
        yield served
        family = served.process.children(recursive=True)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            last = pool.submit(create, served, steps=60)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert last.result().status_code == 200
        code = process.wait(timeout=60)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "a process outlived the command"
    assert code == 0 and output.read_text().endswith("Stopped.\n"), output.read_text()


def create(served: Served, **body: Any) -> httpx.Response:
    tree = {"prompt": "a red circle", "seed": 3} | body
    return httpx.post(served.url + ROUTE, json=tree, timeout=100)


def pixels(data: str) -> np.ndarray:
    made = Image.open(io.BytesIO(base64.b64decode(data)))
    assert made.format == "PNG"
    return np.asarray(made).astype(int)


def only(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return pixels(response.json()["data"][0]["b64_json"])


def metric(served: Served, name: str) -> float:
    lines = httpx.get(f"{served.url}/metrics", timeout=20).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))


def workers(served: Served) -> list[psutil.Process]:
    """Processes forked by the server that a replica starts its workers from."""
    found = []
    for process in served.process.children(recursive=True):
        parent = process.parent()
        if parent is not None and "multiprocessing.forkserver" in " ".join(parent.cmdline()):
            found.append(process)
    return found


def test_official_client_generates_pictures_of_the_size(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "own"
    answer = client.images.generate(
        model="own", prompt="a red circle", n=2, size="32x16", extra_body={"seed": 3, "guidance": 2.5}
    )
    assert answer.data is not None
    first, second = (pixels(one.b64_json or "") for one in answer.data)
    assert first.shape == second.shape == (16, 32, 3) and np.abs(first - second).max() > 8
    assert answer.usage is not None and answer.usage.output_tokens == 2 * 8 * 4 and answer.usage.input_tokens > 2


def test_picture_depends_on_its_seed_alone(served: Served) -> None:
    """Requests that share a batch or wait for each other get the pictures that each gets alone."""
    alone = [only(create(served, seed=seed, prompt=prompt)) for seed, prompt in ((3, "a red circle"), (4, "a blue square"))]
    before, batches = metric(served, "strata_serve_pictures_batched_total"), metric(served, "strata_serve_picture_batches_total")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        bodies = [{"seed": 3}, {"seed": 4, "prompt": "a blue square"}, {"size": "32x16"}, {"steps": 3}] * 2
        answers = list(pool.map(lambda body: only(create(served, **body)), bodies))
    for place in (0, 4):
        assert np.abs(answers[place] - alone[0]).max() <= 1 and np.abs(answers[place + 1] - alone[1]).max() <= 1
        assert answers[place + 2].shape == (16, 32, 3) and np.abs(answers[place + 3] - alone[0]).max() > 1
    assert metric(served, "strata_serve_pictures_batched_total") - before == 8
    assert metric(served, "strata_serve_picture_batches_total") - batches < 8


def test_stream_has_its_events_in_order_and_ends_with_the_picture(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    own = {"seed": 3, "steps": 8, "progress": True}
    stream = client.images.generate(prompt="a red circle", stream=True, partial_images=3, extra_body=own)
    seen: list[Any] = list(stream)
    kinds = [event.type.removeprefix("image_generation.") for event in seen]
    assert kinds == ["progress", "progress", "partial_image"] * 3 + ["progress", "progress", "completed"]
    assert [event.step for event in seen if event.type.endswith("progress")] == list(range(1, 9))
    final = pixels(seen[-1].b64_json)
    assert np.abs(final - only(create(served, steps=8))).max() <= 1
    distances = [np.abs(pixels(event.b64_json) - final).mean() for event in seen if event.type.endswith("partial_image")]
    assert distances == sorted(distances, reverse=True) and distances[-1] < 0.7 * distances[0]


def test_disconnect_frees_the_workers(served: Served) -> None:
    tree = {"prompt": "x", "steps": 400, "stream": True, "progress": True}
    with httpx.stream("POST", served.url + ROUTE, json=tree, timeout=100) as response:
        next(line for line in response.iter_lines() if '"step": 2' in line)
        steps = metric(served, "strata_serve_picture_steps_total")
    assert create(served).status_code == 200  # its batch begins after the cancelled one
    assert metric(served, "strata_serve_picture_steps_total") < steps + 200
    assert metric(served, "strata_serve_pictures_running") == 0


@pytest.mark.parametrize("leader", [True, False])
def test_killed_worker_costs_a_pause(served: Served, leader: bool) -> None:
    expected = only(create(served, steps=60))
    restarts = metric(served, "strata_serve_worker_restarts_total")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(create, served, steps=60)
        steps = metric(served, "strata_serve_picture_steps_total")
        while metric(served, "strata_serve_picture_steps_total") < steps + 3:
            time.sleep(0.02)
        before = sorted(workers(served), key=lambda process: process.pid)
        assert len(before) == 2
        before[0 if leader else 1].kill()
        assert np.abs(only(running.result()) - expected).max() <= 1
    assert metric(served, "strata_serve_worker_restarts_total") == restarts + 1
    after = workers(served)
    assert len(after) == 2 and not {process.pid for process in before} & {process.pid for process in after}


def test_bad_requests_are_refused(served: Served) -> None:
    for body, param in (({"size": "33x32"}, "size"), ({"steps": 401}, "steps"), ({"response_format": "url"}, "response_format")):
        refused = create(served, **body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert create(served, model="other").status_code == 404
