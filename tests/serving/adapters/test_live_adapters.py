"""Adapters that come and go on an endpoint with real engines: one prefill replica and two decode replicas, started once."""

import concurrent.futures
import json
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
import pytest
import torch
from support import STRATA

from strata.platform import ports
from strata.serving import client
from strata.serving.chaos import report, run, session
from strata.serving.chaos.victims import Kind

from . import real_adapters

pytestmark = [pytest.mark.rotation, pytest.mark.long]

NEW = 12
LONG = 150
SETTINGS = "{slots: 2, in_memory: 3, rank: 8, roots: [%s], load: {first: %s}}"
PROMPTS = [list(range(100, 240)), [7, 8, 9] * 20]
WITHIN = 1e-3  # log probabilities


@dataclass
class Live:
    http: httpx.Client
    base: real_adapters.Base
    root: Path
    merged: dict[str, dict[str, torch.Tensor]]
    process: "subprocess.Popen[bytes]"
    output: Path

    def load(self, name: str, folder: Path, **more: Any) -> httpx.Response:
        return self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder), **more})

    def unload(self, name: str) -> httpx.Response:
        return self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def adapter(self, name: str, seed: int, rank: int = 4) -> Path:
        folder = self.root / name
        self.merged[name] = real_adapters.write(self.base, folder, seed, rank)
        return folder

    def expected(self, name: str, prompt: list[int]) -> tuple[list[int], list[float]]:
        return real_adapters.greedy(self.base, self.merged[name], self.root / "merged" / name, prompt, NEW)

    def ask(self, model: str, prompt: list[int], tokens: int = NEW) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        answer = self.http.post("/v1/completions", json=body | {"return_token_ids": True})
        assert answer.status_code == 200, answer.text
        tree: dict[str, Any] = answer.json()
        return tree | {"prefill": answer.headers["x-strata-prefill"]}

    def require_equal(self, model: str, name: str, prompt: list[int]) -> None:
        """The answer of `model` is that of the merged weights of the adapter `name`."""
        tokens, logprobs = self.expected(name, prompt)
        answer = self.ask(model, prompt)
        choice = answer["choices"][0]
        assert (choice["token_ids"], answer["model"]) == (tokens, model)
        distances = [abs(one - other) for one, other in zip(choice["logprobs"]["token_logprobs"], logprobs, strict=True)]
        assert max(distances) < WITHIN, distances

    def names(self) -> list[str]:
        return [card["id"] for card in self.http.get("/v1/models").json()["data"]]

    def metric(self, name: str, **labels: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and all(each in line for each in wanted)
        )


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("adapters")
    base = real_adapters.base(root / "model")
    merged = {"base": base.weights, "first": real_adapters.write(base, root / "first", 1)}
    held, output = ports.reserve(), root / "serve.out"
    words = ["serve.eager=true", "serve.dtype=float32", "serve.decode.replicas=2", "serve.remote_prefill.min_tokens=100"]
    words += [
        f"serve.port={held.port}",
        f"serve.adapters={SETTINGS % (root, root / 'first')}",
        "serve.remote_prefill.when=always",
    ]
    with output.open("wb") as stream:
        environment = os.environ | {"STRATA_HOME": str(root)}
        command = [STRATA, "serve", "--model", str(base.folder), *words]
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    try:
        try:
            client.wait_until_ready(held.url, process, 600)
        except client.NotReady as error:
            raise AssertionError(f"{error.cause}\n{output.read_text()}") from None
        with httpx.Client(base_url=held.url, timeout=120) as http:
            yield Live(http, base, root, merged, process, output)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(90)


def test_the_recipes_adapter_is_served_on_its_base(live: Live) -> None:
    cards = {card["id"]: card for card in live.http.get("/v1/models").json()["data"]}
    assert list(cards) == ["model", "first"] and cards["first"]["parent"] == "model" and "parent" not in cards["model"]
    for prompt in PROMPTS:
        live.require_equal("first", "first", prompt)
        live.require_equal("model", "base", prompt)
        live.require_equal("first", "first", prompt)  # now from the prefix cache, which the base has filled too
    assert live.metric("strata_serve_prefills_total", where="remote") > 0


def test_every_api_answers_with_an_adapter(live: Live) -> None:
    message = {"role": "user", "content": "words of a text"}
    common = {"model": "first", "temperature": 0}
    asked = {
        "/v1/chat/completions": common | {"messages": [message], "max_tokens": 4},
        "/v1/responses": common | {"input": "words", "max_output_tokens": 4},
        "/v1/messages": common | {"messages": [message], "max_tokens": 4},
    }
    for route, body in asked.items():
        answer = live.http.post(route, json=body)
        assert answer.status_code == 200 and answer.json()["model"] == "first", answer.text
    assert live.http.post("/tokenize", json={"model": "first", "prompt": "a few words"}).status_code == 200


def stream(live: Live, model: str, started: threading.Event, tokens: int = LONG) -> tuple[str, list[float]]:
    """Text of a stream, and the times of its events."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    parts, times = [], []
    with live.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                assert event["model"] == model
                parts.append(event["choices"][0]["text"])
                times.append(time.monotonic())
                started.set()
    return "".join(parts), times


def test_an_adapter_is_loaded_beside_running_streams(live: Live) -> None:
    """Streams go on, their text does not change, and the adapter answers as its merged weights do."""
    alone, _ = stream(live, "first", threading.Event())
    folder = live.adapter("second", 2, rank=8)
    started = threading.Event()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        streams = [threads.submit(stream, live, "first", started) for _ in range(4)]
        assert started.wait(60)
        began = time.monotonic()
        assert live.load("second", folder).text == "Success: LoRA adapter 'second' added successfully."
        took = time.monotonic() - began
        assert "second" in live.names()
        for one in streams:
            assert one.result(120)[0] == alone
    live.require_equal("second", "second", PROMPTS[1])
    seconds, loads = live.metric("strata_serve_adapter_load_seconds_sum"), live.metric("strata_serve_adapter_load_seconds_count")
    print(f"load request {took:.3f} s, mean load {seconds / loads:.3f} s of {loads:.0f}")
    assert took < 10  # this machine may be busy; `strata chaos --adapters` measures it


def test_more_adapters_than_slots_and_memory_all_answer(live: Live) -> None:
    names = ["first", "second"]
    if "second" not in live.names():
        assert live.load("second", live.adapter("second", 2, rank=8)).is_success
    for seed in (3, 4, 5):
        names.append(f"more-{seed}")
        assert live.load(names[-1], live.adapter(names[-1], seed)).is_success
    with concurrent.futures.ThreadPoolExecutor(15) as threads:
        wanted = [(name, PROMPTS[1]) for name in names] * 3
        answers = list(threads.map(lambda each: live.ask(*each), wanted))
    for (name, prompt), answer in zip(wanted, answers, strict=True):
        assert answer["choices"][0]["token_ids"] == live.expected(name, prompt)[0], name
    assert live.metric("strata_serve_adapter_evictions_total", reason="memory") > 0
    assert live.metric("strata_serve_adapters_loaded") <= 3 * 3
    for name in names[1:]:
        assert live.unload(name).is_success


def test_a_removed_adapter_ends_its_streams_normally(live: Live) -> None:
    folder, started = live.adapter("leaving", 6), threading.Event()
    assert live.load("leaving", folder).is_success
    alone, _ = stream(live, "leaving", threading.Event())
    with concurrent.futures.ThreadPoolExecutor() as threads:
        running = threads.submit(stream, live, "leaving", started)
        assert started.wait(60)
        assert live.unload("leaving").text == "Success: LoRA adapter 'leaving' removed successfully."
        refused = live.http.post("/v1/completions", json={"model": "leaving", "prompt": [1], "max_tokens": 1})
        assert refused.status_code == 404 and "'first'" in refused.text
        assert running.result(120)[0] == alone
    assert "leaving" not in live.names() and live.unload("leaving").status_code == 404
    deadline = time.monotonic() + 30
    while live.metric("strata_serve_adapters_loaded") > 3 * 1:  # `first` on each replica
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_new_revision_answers_with_its_own_weights(live: Live) -> None:
    folder = live.adapter("changing", 7)
    assert live.load("changing", folder).is_success
    live.require_equal("changing", "changing", PROMPTS[0])
    before = live.expected("changing", PROMPTS[0])
    live.adapter("changing-2", 8)
    for file in (live.root / "changing-2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert live.load("changing", folder).status_code == 400  # the name is taken, by other weights
    assert live.load("changing", folder, load_inplace=True).is_success
    live.require_equal("changing", "changing-2", PROMPTS[0])  # no block of the old revision was read
    assert before != live.expected("changing-2", PROMPTS[0])
    assert live.unload("changing").is_success


def test_refusals(live: Live, tmp_path: Path) -> None:
    folder = live.adapter("refused", 9)
    wide = live.adapter("wide", 9, rank=16)
    for given, cause in (
        (live.load("model", folder), "name of a model"),
        (live.load("x", live.root / "missing"), "There is no folder"),
        (live.load("x", tmp_path), "is not below a folder with adapters"),
        (live.load("x", Path("/etc")), "is not below a folder with adapters"),
        (live.load("x", wide), "rank 16, and this endpoint has memory for rank 8"),
        (live.load("a@b", folder), "An adapter's name has"),
        (live.http.post("/v1/load_lora_adapter", json={"lora_name": "x"}), "'lora_path' must be a text"),
        (live.load("x", folder, weight=3), "'weight' is not a parameter"),
        (live.load("x", folder, model="other"), "does not exist"),
    ):
        assert given.status_code in (400, 404) and cause in given.text, given.text
    text = live.http.post("/v1/load_lora_adapter", content="{}", headers={"content-type": "text/plain"})
    assert text.status_code == 415
    assert live.http.get("/v1/load_lora_adapter").status_code == 405
    assert "x" not in live.names()


@pytest.mark.timeout(900)
def test_no_answer_is_lost_while_replicas_are_killed_and_adapters_come_and_go(live: Live) -> None:
    url = str(live.http.base_url).rstrip("/")
    passing = {name: live.adapter(name, seed) for name, seed in (("passing-1", 11), ("passing-2", 12))}
    requests = session.requests_for(url, 40, seed=0, adapters=["first"])
    faults = [(Kind.DECODE,), (Kind.GATEWAY,)]
    outcome = run.run(url, live.process.pid, requests, faults, concurrency=6, seed=0, passing=passing)
    assert outcome.holds, report.failures(outcome)
    assert outcome.adapters is not None and outcome.adapters.answered > 1
    print(outcome.adapters.line())
    assert live.names() == ["model", "first"]
    live.require_equal("first", "first", PROMPTS[0])  # also on the replica that was started since


@pytest.mark.timeout(900)
def test_an_update_of_the_model_keeps_its_adapters(live: Live) -> None:
    """The last test: it replaces the endpoint's engines by one. Requests to an adapter are answered at every moment."""
    other = real_adapters.base(live.root / "other", seed=2)
    live.merged |= {"other": other.weights, "first-on-other": real_adapters.write(other, live.root / "same-first", 1)}
    assert live.load("later", live.adapter("later", 20)).is_success
    live.merged["later-on-other"] = real_adapters.write(other, live.root / "same-later", 20)
    old, statuses, over = live.ask("first", PROMPTS[1])["choices"][0]["token_ids"], list[int](), threading.Event()

    def ask() -> None:
        body = {"model": "first", "prompt": PROMPTS[1], "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        while not over.wait(0.2):
            statuses.append(live.http.post("/v1/completions", json=body).status_code)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        asking = threads.submit(ask)
        try:
            smaller = {"prefill": {"replicas": 0}, "decode": {"replicas": 1}}
            sent = live.http.post("/-/models/model", json={"model": str(other.folder), "serve": smaller})
            assert sent.status_code == 202, sent.text
            deadline = time.monotonic() + 300
            while (state := live.http.get("/-/models").json()["data"][0])["state"] != "ready":
                assert time.monotonic() < deadline and "failed" not in state["state"], state
                time.sleep(0.5)
        finally:
            over.set()
        asking.result(120)
    assert statuses and set(statuses) == {200}
    assert live.names() == ["model", "first", "later"]
    live.require_equal("model", "other", PROMPTS[1])
    live.require_equal("first", "first-on-other", PROMPTS[1])
    live.require_equal("later", "later-on-other", PROMPTS[1])
    assert live.ask("first", PROMPTS[1])["choices"][0]["token_ids"] != old
    assert live.unload("later").is_success
