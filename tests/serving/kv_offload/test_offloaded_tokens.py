"""KV blocks from host memory and disk in real engines on the CPU: tokens are those of `transformers`.

One endpoint has two models of the same weights, each with a prefill and a decode engine. `auto` chooses between local and remote
prefill; `always` prefills remotely. A KV cache holds three prompts, host memory a few more, and the disk all.
"""

import os
import re
import signal
import subprocess
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
from strata.serving import client
from strata.serving.chaos.victims import Kind, Processes
from strata.training.checkpoint.export import write_folder
from strata.training.data import tokenizer
from strata.training.model.llama import Llama

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.timeout(900)]

SIZES = ["model.layers=3", "model.hidden=128", "model.heads=4", "model.kv_heads=2", "model.ffn=256", "model.vocab=512"]
CONTEXT, PROMPT, BLOCK, NEW = 512, 300, 32, 12
WHOLE = PROMPT // BLOCK  # blocks of a prompt
BLOCK_BYTES = 3 * 2 * 2 * 32 * 4 * BLOCK  # layers, key and value, heads, head size, float32
CACHED, HOST = 48, 128  # blocks
QUESTION = [5, 6, 7] * 20


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    return [(7 * number + 31 * seed + number * seed % 13) % 500 for number in range(length)]


@dataclass(frozen=True)
class Endpoint:
    http: httpx.Client
    process: psutil.Process
    folder: Path  # of the disk tier
    model: Any  # of transformers

    def ask(self, model: str, ids: list[int], **more: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": ids, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = self.http.post("/v1/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice | {"place": answer.headers["x-strata-prefill"]}

    def expected(self, ids: list[int]) -> list[int]:
        given = torch.tensor([ids])
        options = {"attention_mask": torch.ones_like(given), "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        tokens: list[int] = self.model.generate(given, **options)[0, len(ids) :].tolist()
        return tokens

    def found(self, model: str, role: str, tier: str) -> float:
        """Tokens that a tier had."""
        pattern = r"^strata_serve_kv_tier_hit_tokens_total\{([^}]*)\} (\S+)$"
        labels = [f'model="{model}"', f'role="{role}"', f'tier="{tier}"']
        lines = re.findall(pattern, self.http.get("/metrics").text, re.MULTILINE)
        return sum(float(value) for names, value in lines if all(label in names for label in labels))

    def finds(self, model: str, role: str, tier: str, least: float) -> bool:
        """Waits for the counter: metrics follow an answer within seconds."""
        deadline = time.monotonic() + 20
        while self.found(model, role, tier) < least:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def evict(self, model: str, first: int, blocks: int) -> None:
        """Fills caches with other prompts."""
        for seed in range(first, first + blocks // WHOLE + 1):
            self.ask(model, prompt(seed), max_tokens=1)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    from transformers import AutoModelForCausalLM

    home = tmp_path_factory.mktemp("offload")
    folder, kv = home / "auto", home / "kv"
    folder.mkdir()
    words = tokenizer.train(["a few words of a text, and numbers: 0 1 2 3 4 5 6 7 8 9"] * 3, 400)
    section = recipe_file.load("laptop", [*SIZES, f"model.context={CONTEXT}"]).model
    model, noise = Llama(section), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # no two logits are within rounding
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    tokenizer.save(words, folder, CONTEXT)
    write_folder(folder, dict(model.state_dict()), section, torch.float32)
    held, output = ports.reserve(), home / "serve.out"
    tiers = f"{{cpu_gib: {HOST * BLOCK_BYTES / 2**30}, disk: {kv}, disk_gib: 1}}"
    settings = [f"serve.kv_offload={tiers}", f"serve.models={{always: {{model: {folder}, remote_prefill: {{when: always}}}}}}"]
    settings += [
        "serve.remote_prefill={when: cheaper, min_tokens: 150}",
        "serve.max_sequences=4",
        "serve.eager=true",
        "serve.dtype=float32",
    ]
    settings += [f"serve.engine={{num_gpu_blocks_override: {CACHED}}}"]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [STRATA, "serve", "--model", str(folder), f"serve.port={held.port}", *settings],
            env=os.environ | {"STRATA_HOME": str(home)},
            stdout=stream,
            stderr=stream,
        )
    try:
        try:
            client.wait_until_ready(held.url, process, 500)
        except client.NotReady as error:
            raise AssertionError(f"{error.cause}\n{output.read_text()}") from None
        with httpx.Client(base_url=held.url, timeout=120) as http:
            deadline = time.monotonic() + 300
            while (answer := http.get("/ready", params={"model": "always"})).status_code != 200:
                assert time.monotonic() < deadline, answer.text
                time.sleep(0.5)
            yield Endpoint(http, psutil.Process(process.pid), kv, AutoModelForCausalLM.from_pretrained(folder))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def second_turn(endpoint: Endpoint, model: str, seed: int) -> list[int]:
    """Asks the first turn. Returns the second."""
    first = prompt(seed)
    answer = endpoint.ask(model, first)["token_ids"]
    assert answer == endpoint.expected(first)
    return first + answer + QUESTION


@pytest.mark.parametrize(("model", "role"), [("auto", "decode"), ("always", "prefill")])
def test_second_turn_is_read_from_host_memory(endpoint: Endpoint, model: str, role: str) -> None:
    ids = second_turn(endpoint, model, seed=1)
    endpoint.evict(model, 100, CACHED)
    before = endpoint.found(model, role, "cpu")
    answer = endpoint.ask(model, ids)
    assert answer["token_ids"] == endpoint.expected(ids)
    assert answer["place"].startswith("local" if model == "auto" else "remote")
    assert endpoint.finds(model, role, "cpu", before + WHOLE * BLOCK)


@pytest.mark.parametrize("model", ["auto", "always"])
def test_second_turn_is_read_from_the_disk(endpoint: Endpoint, model: str) -> None:
    role = "prefill" if model == "always" else "decode"
    ids = second_turn(endpoint, model, seed=2)
    endpoint.evict(model, 200, 2 * HOST)
    before = endpoint.found(model, role, "disk")
    assert endpoint.ask(model, ids)["token_ids"] == endpoint.expected(ids)
    assert endpoint.finds(model, role, "disk", before + (WHOLE * BLOCK if model == "always" else 0))


@pytest.mark.parametrize("model", ["auto", "always"])
def test_logprobs_are_those_of_computed_blocks(endpoint: Endpoint, model: str) -> None:
    ids = second_turn(endpoint, model, seed=3)
    endpoint.evict(model, 300, CACHED)
    read = endpoint.ask(model, ids, logprobs=3)["logprobs"]
    computed = endpoint.ask(model, ids, logprobs=3, cache_salt="other")["logprobs"]
    assert read["tokens"] == computed["tokens"] and len(read["tokens"]) == NEW
    assert read["token_logprobs"] == pytest.approx(computed["token_logprobs"], abs=1e-4)


def test_blocks_of_another_salt_are_not_read(endpoint: Endpoint) -> None:
    ids = second_turn(endpoint, "always", seed=4)
    endpoint.evict("always", 400, CACHED)
    before = [endpoint.found("always", "prefill", tier) for tier in ("cpu", "disk")]
    assert endpoint.ask("always", ids, cache_salt="salt")["token_ids"] == endpoint.expected(ids)
    assert [endpoint.found("always", "prefill", tier) for tier in ("cpu", "disk")] == before


def test_damaged_files_are_computed_again(endpoint: Endpoint) -> None:
    ids = second_turn(endpoint, "always", seed=5)
    endpoint.evict("always", 500, 2 * HOST)
    files = list(endpoint.folder.rglob("*.bin"))
    assert len(files) > HOST
    for number, file in enumerate(files):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] if number % 2 else bytes([whole[0] ^ 255]) + whole[1:])
    assert endpoint.ask("always", ids)["token_ids"] == endpoint.expected(ids)
    assert endpoint.ask("always", prompt(500))["token_ids"] == endpoint.expected(prompt(500))


def test_folder_that_is_gone(endpoint: Endpoint) -> None:
    """A file in its place, so that nothing can be written or read, until it is back."""
    away = endpoint.folder.with_name("away")
    endpoint.folder.rename(away)
    endpoint.folder.write_text("")
    try:
        ids = second_turn(endpoint, "always", seed=6)
        endpoint.evict("always", 600, 2 * HOST)
        assert endpoint.ask("always", ids)["token_ids"] == endpoint.expected(ids)
    finally:
        endpoint.folder.unlink()
        away.rename(endpoint.folder)
    assert endpoint.ask("always", prompt(7))["token_ids"] == endpoint.expected(prompt(7))


def test_new_engine_reads_the_blocks_of_a_killed_one(endpoint: Endpoint) -> None:
    ids = second_turn(endpoint, "auto", seed=8)
    time.sleep(1)  # written in the background
    processes = Processes(endpoint.process.pid)
    killed = [victim for kind in (Kind.PREFILL_ENGINE, Kind.DECODE_ENGINE) for victim in processes.find(kind)]
    assert killed
    for victim in killed:
        processes.kill(victim)
    deadline = time.monotonic() + 200
    while endpoint.http.get("/ready").status_code == 200 and time.monotonic() < deadline - 190:
        time.sleep(0.2)
    while endpoint.http.get("/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert endpoint.ask("auto", ids)["token_ids"] == endpoint.expected(ids)
    assert sum(endpoint.found("auto", role, "disk") for role in ("prefill", "decode")) >= BLOCK
    assert not list(Path("/dev/shm").glob("vllm_offload_*"))
