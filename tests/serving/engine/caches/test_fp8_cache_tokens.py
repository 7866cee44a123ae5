"""fp8 KV caches in real engines on the CPU: tokens after a hand-over are those of one engine with the same cache.

One endpoint has a pair of pools, and a further model with the same weights in one engine, which also drafts by n-grams.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
from support import STRATA

from strata.platform import ports, recipe_file
from strata.platform.hardware.machine import cpu_flags
from strata.serving import client
from strata.serving.chaos import report, run, session
from strata.serving.chaos.victims import Kind
from strata.serving.models.kv_cache_check import AVX512
from strata.serving.spec import CPU_BLOCK as BLOCK
from strata.training.checkpoint.export import write_folder
from strata.training.data import tokenizer
from strata.training.model.llama import Llama

engines = [
    pytest.mark.slow,
    pytest.mark.rotation,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not cpu_flags() >= AVX512, reason="needs AVX-512"),
]

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 32
SIZES = [f"model.layers={LAYERS}", "model.hidden=128", "model.heads=4", f"model.kv_heads={KV_HEADS}", "model.ffn=256"]
CONTEXT, NEW = 512, 24
PAIR, ALONE = "pair", "alone"
LENGTHS = (1, 5, 90, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 300)
PROMPTS = [[(7 * number + length) % 500 for number in range(length)] for length in LENGTHS]
PROMPTS += [[11, 12, 13, 14] * 20, [21, 22, 23] * 43]
OFF = {"x-strata-speculation": "off"}


@dataclass(frozen=True)
class Endpoint:
    http: httpx.Client
    url: str
    process: psutil.Process

    def ask(self, model: str, prompt: list[int], headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body | {"return_token_ids": True} | more, headers=headers)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice | {"place": answer.headers["x-strata-prefill"]}

    def moved_bytes(self) -> float:
        return sum(map(float, re.findall(r"^vllm:nixl_bytes_transferred_sum\{[^}]*\} (\S+)$", self._metrics(), re.MULTILINE)))

    def cache_dtypes(self) -> set[str]:
        return set(re.findall(r'^vllm:cache_config_info\{.*[{,]cache_dtype="(\w+)"', self._metrics(), re.MULTILINE))

    def _metrics(self) -> str:
        return self.http.get("/metrics").raise_for_status().text


def write_model(folder: Path) -> None:
    words = tokenizer.train(["a few words of a text, and numbers: 0 1 2 3 4 5 6 7 8 9"] * 3, 400)
    section = recipe_file.load("laptop", [*SIZES, "model.vocab=512", f"model.context={CONTEXT}"]).model
    model, noise = Llama(section), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # no two logits are within rounding
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    folder.mkdir()
    tokenizer.save(words, folder, CONTEXT)
    write_folder(folder, dict(model.state_dict()), section, torch.float32)


def wait_for_further_model(http: httpx.Client) -> None:
    deadline = time.monotonic() + 300
    while (answer := http.get("/ready", params={"model": ALONE})).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.5)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    home = tmp_path_factory.mktemp("fp8")
    write_model(home / PAIR)
    held, output = ports.reserve(), home / "serve.out"
    further = f"{{{ALONE}: {{model: {home / PAIR}, prefill: {{replicas: 0}}, speculative: {{method: ngram, tokens: 4}}}}}}"
    words = ["serve.kv_cache_dtype=fp8", f"serve.models={further}", "serve.remote_prefill.when=always"]
    words += ["serve.max_sequences=8", "serve.eager=true", "serve.dtype=float32"]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [STRATA, "serve", "--model", str(home / PAIR), f"serve.port={held.port}", *words],
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
            wait_for_further_model(http)
            yield Endpoint(http, held.url, psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


class TestEndpoint:
    pytestmark = engines

    def test_every_engine_has_the_cache(self, endpoint: Endpoint) -> None:
        assert endpoint.cache_dtypes() == {"fp8"}

    def test_tokens_after_a_hand_over_are_those_of_one_engine(self, endpoint: Endpoint) -> None:
        moved = endpoint.moved_bytes()
        handed_over = [endpoint.ask(PAIR, prompt) for prompt in PROMPTS]
        moved = endpoint.moved_bytes() - moved
        assert all(answer["place"].startswith("remote") for answer in handed_over)
        alone = [endpoint.ask(ALONE, prompt, OFF) for prompt in PROMPTS]
        assert all(answer["place"].startswith("local") for answer in alone)
        assert [answer["token_ids"] for answer in handed_over] == [answer["token_ids"] for answer in alone]
        assert len({tuple(answer["token_ids"]) for answer in alone}) == len(PROMPTS)
        blocks = sum(-(-len(prompt) // BLOCK) for prompt in PROMPTS)
        assert moved == blocks * BLOCK * LAYERS * 2 * KV_HEADS * HEAD_DIM  # one byte for each number

    def test_tokens_with_drafts(self, endpoint: Endpoint) -> None:
        for prompt in PROMPTS:
            drafted, plain = (endpoint.ask(ALONE, prompt, headers)["token_ids"] for headers in ({}, OFF))
            assert drafted == plain

    def test_logprobs_after_a_hand_over(self, endpoint: Endpoint) -> None:
        for prompt in PROMPTS:
            remote, local = (endpoint.ask(model, prompt, OFF, logprobs=3)["logprobs"] for model in (PAIR, ALONE))
            assert remote["token_logprobs"] == pytest.approx(local["token_logprobs"], abs=1e-4)

    @pytest.mark.long
    def test_killed_decode_replica(self, endpoint: Endpoint) -> None:
        requests = session.requests_for(endpoint.url, 40, seed=0)
        outcome = run.run(endpoint.url, endpoint.process.pid, requests, [(Kind.DECODE,)], concurrency=6, seed=0)
        assert outcome.holds, report.failures(outcome)


@pytest.mark.slow
def test_handshake_refuses_another_dtype() -> None:
    """NIXL would move the bytes of one dtype into a cache of the other."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash

    model = SimpleNamespace(
        model="m",
        dtype=torch.bfloat16,
        get_total_num_kv_heads=lambda: KV_HEADS,
        get_head_size=lambda: HEAD_DIM,
        get_total_num_hidden_layers=lambda: LAYERS,
    )

    def handshake(dtype: str) -> str:
        scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
        config = SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(cache_dtype=dtype),
            scheduler_config=scheduler,
            speculative_config=None,
        )
        found: str = compute_nixl_compatibility_hash(config, "CPU_ATTN")
        return found

    assert handshake("fp8") == handshake("fp8") != handshake("auto")
