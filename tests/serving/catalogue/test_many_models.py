"""Several models behind one endpoint, on real CPU engines: added, updated under load, killed and removed."""

import concurrent.futures
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from support import STRATA

from strata.platform import ports, recipe_file
from strata.platform.errors import UserError
from strata.serving import client
from strata.serving.bench.contenders import dummy_model
from strata.serving.catalogue import commands

START_S = 600.0
SHAPE = ("layers=2", "hidden=128", "heads=4", "kv_heads=2", "ffn=256", "vocab=512", "context=256")
PROMPT = {"prompt": [7, 8, 9], "max_tokens": 16, "temperature": 0, "ignore_eos": True}

pytestmark = [pytest.mark.rotation, pytest.mark.long, pytest.mark.timeout(1800)]


@dataclass
class Endpoint:
    url: str
    weights: list[Path]  # model folders
    process: psutil.Process
    output: Path

    def complete(self, model: str | None, **more: Any) -> httpx.Response:
        named = {"model": model} if model is not None else {}
        return httpx.post(f"{self.url}/v1/completions", json=named | PROMPT | more, timeout=240)

    def text(self, model: str | None) -> str:
        response = self.complete(model)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def send(self, method: str, path: str, tree: Any = None) -> httpx.Response:
        return httpx.request(method, f"{self.url}{path}", json=tree, timeout=60)

    def models(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.send("GET", "/-/models").json()["data"]}

    def until(self, name: str, *states: str) -> dict[str, Any]:
        ends = time.monotonic() + START_S
        while (found := self.models().get(name, {"state": "gone"}))["state"] not in states:
            assert time.monotonic() < ends and self.process.is_running(), (found, self.output.read_text())
            time.sleep(0.5)
        return found

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Processes of the replicas of an application's deployment, by Ray's titles."""
        return [one for one in self.process.children(recursive=True) if deployment in " ".join(_command(one))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    home = tmp_path_factory.mktemp("models")
    recipe = recipe_file.load("laptop", [f"model.{word}" for word in SHAPE])
    weights = [home / name for name in ("first", "second", "third")]
    for seed, folder in enumerate(weights):
        torch.manual_seed(seed)
        dummy_model.write(folder, recipe)
    held = ports.reserve()
    output = home / "serve.out"
    settings = ("serve.prefill.replicas=0", "serve.eager=true", "serve.max_sequences=8", "serve.gateways=2")
    with output.open("wb") as stream:
        started = subprocess.Popen(
            [
                *(STRATA, "serve", "--model", str(weights[0]), f"serve.port={held.port}", "serve.start_timeout_s=900"),
                *(*settings, f"serve.models.second.model={weights[1]}"),
            ],
            env=os.environ | {"STRATA_HOME": str(home)},
            stdout=stream,
            stderr=stream,
        )
    made = Endpoint(held.url, weights, psutil.Process(started.pid), output)
    try:
        client.wait_until_ready(held.url, started, START_S)
        made.until("second", "ready")
        yield made
        family = made.process.children(recursive=True)
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=90) == 0, output.read_text()
    finally:
        started.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "a process outlived the command"


class Load:
    """Clients that stream from a model until the end of a block. `failures` has every answer that is not whole."""

    def __init__(self, endpoint: Endpoint, model: str, clients: int = 3) -> None:
        self._endpoint, self._model, self._clients = endpoint, model, clients
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.texts: list[str] = []

    def __enter__(self) -> "Load":
        self._pool = concurrent.futures.ThreadPoolExecutor(self._clients)
        self._running = [self._pool.submit(self._run) for _ in range(self._clients)]
        return self

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                response = self._endpoint.complete(self._model, max_tokens=64)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
                continue
            if response.status_code != 200 or response.json()["usage"]["completion_tokens"] != 64:
                self.failures.append(response.text)
            else:
                self.texts.append(response.json()["choices"][0]["text"])

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for one in self._running:
            one.result()


def test_models_of_the_recipe_answer_by_name(endpoint: Endpoint) -> None:
    assert endpoint.text(None) == endpoint.text("first") != endpoint.text("second")
    assert endpoint.complete("second").json()["model"] == "second"
    assert [card["id"] for card in endpoint.send("GET", "/v1/models").json()["data"]] == ["first", "second"]
    unknown = endpoint.complete("third")
    assert unknown.status_code == 404 and "'first' and 'second'" in unknown.json()["error"]["message"]
    tokens = endpoint.send("POST", "/tokenize", {"model": "second", "prompt": "w7 w8"}).json()
    assert tokens["tokens"] == [7, 8]


def test_a_model_is_added_used_by_an_alias_and_removed(endpoint: Endpoint) -> None:
    before = endpoint.text("first"), endpoint.text("second")
    added = endpoint.send("POST", "/-/models", {"name": "third", "model": str(endpoint.weights[2])})
    assert added.status_code == 202 and added.json()["state"] == "starting"
    assert endpoint.send("POST", "/-/models", {"name": "third", "model": str(endpoint.weights[2])}).status_code == 409
    endpoint.until("third", "ready")
    own = endpoint.text("third")
    assert own not in before and (endpoint.text("first"), endpoint.text("second")) == before
    assert endpoint.send("POST", "/-/aliases/chat", {"models": {"second": 1, "third": 1}}).status_code == 200
    chosen = {user: endpoint.complete("chat", user=user).json() for user in map(str, range(12))}
    assert {answer["model"] for answer in chosen.values()} == {"second", "third"}
    for user, answer in chosen.items():
        assert endpoint.complete("chat", user=user).json()["model"] == answer["model"]
        assert answer["choices"][0]["text"] == (own if answer["model"] == "third" else before[1])
    cards = {card["id"]: card for card in endpoint.send("GET", "/v1/models").json()["data"]}
    assert cards["chat"]["root"] == "second"
    assert endpoint.send("DELETE", "/-/models/third").status_code == 409  # the alias uses it
    assert endpoint.send("DELETE", "/-/aliases/chat").status_code == 200
    assert endpoint.send("DELETE", "/-/models/third").status_code == 202
    endpoint.until("third", "gone")
    assert endpoint.complete("third").status_code == 404 and endpoint.complete("chat").status_code == 404


def test_new_weights_replace_the_old_ones_under_load_without_a_failed_request(endpoint: Endpoint) -> None:
    with Load(endpoint, "second") as load:
        while len(load.texts) < 3:
            time.sleep(0.1)
        old = set(load.texts)
        assert endpoint.send("POST", "/-/models/second", {"model": str(endpoint.weights[2])}).status_code == 202
        endpoint.until("second", "ready")
        after = len(load.texts)
        while len(load.texts) < after + 6:
            time.sleep(0.1)
    assert not load.failures, load.failures[:3]
    assert len(old) == 1 and len(set(load.texts)) == 2 and load.texts[-1] not in old
    ends = time.monotonic() + 120
    while len(endpoint.models()["second"]["revisions"]) > 1:  # the old engines end
        assert time.monotonic() < ends
        time.sleep(0.5)
    assert endpoint.text("first") != endpoint.text("second")


def test_the_main_model_is_updated_and_its_gateways_stay(endpoint: Endpoint) -> None:
    gateways = {one.pid for one in endpoint.replicas("gateway")}
    before = endpoint.text(None)
    with Load(endpoint, "first", 2) as load:
        assert endpoint.send("POST", "/-/models/first", {"model": str(endpoint.weights[1])}).status_code == 202
        endpoint.until("first", "ready")
    assert not load.failures, load.failures[:3]
    ends = time.monotonic() + 120
    while len(endpoint.models()["first"]["revisions"]) > 1:
        assert time.monotonic() < ends
        time.sleep(0.5)
    assert endpoint.text(None) == endpoint.text("first") != before
    assert {one.pid for one in endpoint.replicas("gateway")} == gateways
    assert endpoint.send("GET", "/ready").status_code == 200


def test_models_that_cannot_start_leave_the_others_alone(endpoint: Endpoint, tmp_path: Path) -> None:
    before = endpoint.text("second")
    refused = endpoint.send("POST", "/-/models", {"name": "none", "model": str(tmp_path / "missing")})
    assert refused.status_code == 400 and "no model folder" in refused.json()["error"]["message"]
    many = endpoint.send(
        "POST", "/-/models", {"name": "none", "model": str(endpoint.weights[0]), "serve": {"decode": {"replicas": 500}}}
    )
    assert many.status_code == 400 and ("GiB" in many.text or "CPU" in many.text)
    wrong = {"name": "broken", "model": str(endpoint.weights[0]), "serve": {"engine": {"max_model_len": 100_000}}}
    assert endpoint.send("POST", "/-/models", wrong).status_code == 202
    failed = endpoint.until("broken", "failed")
    assert "max_model_len" in failed["revisions"][0]["reason"]
    update = endpoint.send("POST", "/-/models/second", {"model": str(endpoint.weights[0]), "serve": wrong["serve"]})
    assert update.status_code == 202
    assert "max_model_len" in endpoint.until("second", "update failed")["revisions"][-1]["reason"]
    assert endpoint.text("second") == before
    assert endpoint.send("DELETE", "/-/models/broken").status_code == 202
    endpoint.until("broken", "gone")


def test_a_killed_replica_of_one_model_does_not_touch_the_other(endpoint: Endpoint) -> None:
    victims = [one for one in endpoint.replicas("decode") if "second" in " ".join(_command(one))]
    assert victims, [" ".join(_command(one)) for one in endpoint.process.children(recursive=True)]
    with Load(endpoint, "first", 2) as load:
        for one in victims:
            one.kill()
        assert endpoint.complete("second").status_code == 200  # it waits for the new replica
    assert not load.failures, load.failures[:3]


def test_commands(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> None:
    commands.models_list(endpoint.url)
    assert "first (main)" in capsys.readouterr().out
    commands.models_alias("short", ["first"], endpoint.url)
    assert endpoint.complete("short").json()["model"] == "first"
    commands.models_remove("short", endpoint.url)
    with pytest.raises(UserError, match="no model 'none'"):
        commands.models_remove("none", endpoint.url)
