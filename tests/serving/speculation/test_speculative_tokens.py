"""Speculative decoding in real engines on the CPU: tokens are those of `transformers`, and of the same engines without drafts.

One endpoint has a pair of pools with a draft model in Strata's own drafter, a further model with n-grams in pools of its own, and
one with a draft that vLLM computes. The first draft has another number of layers and of KV heads than its target, and proposes
many right tokens and some wrong ones. The other one has random weights: its drafts are rejected.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from support import STRATA
from transformers import AutoModelForCausalLM, Olmo2Config

from strata.platform import ports, recipe_file
from strata.serving import client
from strata.serving.chaos import report, run, session
from strata.serving.chaos.victims import Kind
from strata.training.checkpoint.export import write_folder
from strata.training.data import tokenizer
from strata.training.model.llama import Llama

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.timeout(900)]

SIZES = ["model.layers=3", "model.hidden=128", "model.heads=4", "model.kv_heads=2", "model.ffn=256", "model.vocab=512"]
CONTEXT, BLOCK, NEW, TOKENS = 512, 128, 24, 3
NAMES = ("drafted", "looked-up", "drafted-by-vllm")
LENGTHS = (1, 5, 90, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 300)
PROMPTS = [[(7 * number + length) % 500 for number in range(length)] for length in LENGTHS]
PROMPTS += [[11, 12, 13, 14] * 20, [21, 22, 23] * 43, list(range(100, 100 + CONTEXT - NEW - 1 - 100)) + list(range(100))]
OFF = {"x-strata-speculation": "off"}


def write_models(target: Path, small: Path) -> None:
    """The draft is the target without its last layers, which change little, and with each KV head twice."""
    words = tokenizer.train(["a few words of a text, and numbers: 0 1 2 3 4 5 6 7 8 9"] * 3, 400)
    whole = recipe_file.load("laptop", [*SIZES, f"model.context={CONTEXT}"]).model
    part = whole.model_copy(update={"layers": 1, "kv_heads": 4})
    model, noise = Llama(whole), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # no two logits are within rounding
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    weights = dict(model.state_dict())
    for name in weights:
        if re.search(r"layers\.[12]\..*(o_proj|down_proj)", name):
            weights[name] = weights[name] * 0.3
    drafted = {name: value for name, value in weights.items() if not re.search(r"layers\.[12]\.", name)}
    for name in [name for name in drafted if re.search(r"[kv]_proj", name)]:
        heads = drafted[name].reshape(2, -1, drafted[name].shape[-1])
        drafted[name] = heads.repeat_interleave(2, dim=0).reshape(-1, heads.shape[-1]).contiguous()
    for folder, section, tensors in ((target, whole, weights), (small, part, drafted)):
        folder.mkdir()
        tokenizer.save(words, folder, CONTEXT)
        write_folder(folder, tensors, section, torch.float32)


@dataclass(frozen=True)
class Endpoint:
    http: httpx.Client
    url: str
    process: psutil.Process
    expected: list[list[int]]  # by prompt

    def ask(self, model: str, prompt: list[int], headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body | {"return_token_ids": True} | more, headers=headers)
        assert answer.status_code == 200, answer.text
        tree = answer.json()
        choice: dict[str, Any] = tree["choices"][0]
        return choice | {"usage": tree["usage"], "place": answer.headers["x-strata-prefill"]}

    def counted(self, model: str) -> dict[str, float]:
        """Drafted and accepted tokens."""
        text = self.http.get("/metrics").text
        found = {}
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            metric = f"vllm:spec_decode_num_{name}_total{{"
            lines = [line for line in text.splitlines() if line.startswith(metric) and f'model_name="{model}"' in line]
            found[name] = sum(float(line.split()[-1]) for line in lines)
        return found


def tokens_of_transformers(folder: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        # By default tokens with the id of padding are masked, and prompts have it as an ordinary token.
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        found.append(model.generate(ids, **options)[0, len(prompt) :].tolist())
    return found


def write_foreign_draft(folder: Path, words: Path) -> None:
    """A draft of a family that Strata's own drafter does not compute."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    common = {"num_hidden_layers": 1, "vocab_size": 512, "max_position_embeddings": CONTEXT}
    AutoModelForCausalLM.from_config(Olmo2Config(**sizes, **common)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(words / name, folder)


def wait_for_further_models(http: httpx.Client) -> None:
    deadline = time.monotonic() + 300
    for name in NAMES[1:]:
        while (answer := http.get("/ready", params={"model": name})).status_code != 200:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.5)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    home = tmp_path_factory.mktemp("speculative")
    target, small = home / "drafted", home / "small"
    write_models(target, small)
    held, output = ports.reserve(), home / "serve.out"
    write_foreign_draft(home / "foreign", small)
    methods = {"looked-up": "method: ngram, draft: null, tokens: 4", "drafted-by-vllm": f"draft: {home / 'foreign'}"}
    models = (f"{name}: {{model: {target}, speculative: {{{method}}}}}" for name, method in methods.items())
    further = f"{{{', '.join(models)}}}"
    words = [f"serve.speculative={{method: draft, draft: {small}, tokens: {TOKENS}}}", f"serve.models={further}"]
    words += ["serve.remote_prefill.when=always", "serve.max_sequences=8", "serve.eager=true", "serve.dtype=float32"]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [STRATA, "serve", "--model", str(target), f"serve.port={held.port}", *words],
            env=os.environ | {"STRATA_HOME": str(home)},
            stdout=stream,
            stderr=stream,
        )
    try:
        expected = tokens_of_transformers(target)
        try:
            client.wait_until_ready(held.url, process, 500)
        except client.NotReady as error:
            raise AssertionError(f"{error.cause}\n{output.read_text()}") from None
        with httpx.Client(base_url=held.url, timeout=120) as http:
            wait_for_further_models(http)
            yield Endpoint(http, held.url, psutil.Process(process.pid), expected)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.parametrize("model", NAMES)
def test_tokens_after_a_remote_prefill(endpoint: Endpoint, model: str) -> None:
    before = endpoint.counted(model)
    answers = [endpoint.ask(model, prompt) for prompt in PROMPTS]
    assert all(answer["place"].startswith("remote") for answer in answers)
    assert [answer["token_ids"] for answer in answers] == endpoint.expected
    assert all(answer["usage"]["completion_tokens"] == NEW for answer in answers)
    after = endpoint.counted(model)
    drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    assert 0 < accepted < drafted if model != "drafted-by-vllm" else accepted < drafted


@pytest.mark.parametrize("model", NAMES)
def test_tokens_after_a_local_prefill(endpoint: Endpoint, model: str) -> None:
    answers = [endpoint.ask(model, prompt, prompt_logprobs=0) for prompt in PROMPTS]
    assert {answer["place"] for answer in answers} == {"local; reason=prompt-logprobs"}
    assert [answer["token_ids"] for answer in answers] == endpoint.expected


@pytest.mark.parametrize("model", NAMES)
def test_tokens_of_many_requests_at_once(endpoint: Endpoint, model: str) -> None:
    """Sequences that join running ones, with a prompt that is computed except for one token."""
    salted = [{"cache_salt": str(number)} for number in range(3)]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            (number, pool.submit(endpoint.ask, model, prompt, **salt)) for salt in salted for number, prompt in enumerate(PROMPTS)
        ]
        for number, future in asked:
            assert future.result()["token_ids"] == endpoint.expected[number], LENGTHS[number : number + 1]


@pytest.mark.parametrize("model", NAMES)
def test_request_without_drafts(endpoint: Endpoint, model: str) -> None:
    before = endpoint.counted(model)
    answers = [endpoint.ask(model, prompt, OFF) for prompt in PROMPTS]
    assert [answer["token_ids"] for answer in answers] == endpoint.expected
    assert endpoint.counted(model) == before


@pytest.mark.parametrize("model", NAMES)
def test_logprobs_are_those_without_drafts(endpoint: Endpoint, model: str) -> None:
    for prompt in PROMPTS:
        drafted, plain = (endpoint.ask(model, prompt, headers, logprobs=3)["logprobs"] for headers in ({}, OFF))
        assert drafted["tokens"] == plain["tokens"] and len(plain["tokens"]) == NEW
        assert drafted["token_logprobs"] == pytest.approx(plain["token_logprobs"], abs=1e-4)
        for one, other in zip(drafted["top_logprobs"], plain["top_logprobs"], strict=True):
            assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("model", NAMES)
def test_structured_output(endpoint: Endpoint, model: str) -> None:
    wanted = {"structured_outputs": {"regex": "([0-4] ){8}[5-9]"}, "ignore_eos": False}
    for prompt in PROMPTS[:6]:
        drafted, plain = (endpoint.ask(model, prompt, headers, **wanted) for headers in ({}, OFF))
        assert re.fullmatch("([0-4] ){8}[5-9]", drafted["text"]), drafted["text"]
        assert drafted["token_ids"] == plain["token_ids"] and drafted["finish_reason"] == "stop"


@pytest.mark.parametrize("model", NAMES)
def test_stop_within_accepted_drafts(endpoint: Endpoint, model: str) -> None:
    for prompt, expected in zip(PROMPTS, endpoint.expected, strict=True):
        stop = expected[7]
        answer = endpoint.ask(model, prompt, stop_token_ids=[stop])
        assert answer["token_ids"] == expected[: expected.index(stop) + 1] and answer["finish_reason"] == "stop"


@pytest.mark.parametrize("model", NAMES)
def test_streams_and_samples(endpoint: Endpoint, model: str) -> None:
    body = {"model": model, "prompt": PROMPTS[3], "max_tokens": NEW, "stream": True, "ignore_eos": True, "seed": 5}
    usage = {"stream_options": {"include_usage": True}}
    for temperature in (0, 0.8):
        with endpoint.http.stream("POST", "/v1/completions", json=body | usage | {"temperature": temperature}) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        assert events[-1]["usage"]["completion_tokens"] == NEW
        if temperature == 0:
            text = "".join(choice["text"] for event in events for choice in event["choices"])
            assert text == endpoint.ask(model, PROMPTS[3])["text"]


@pytest.mark.long
def test_killed_decode_replica(endpoint: Endpoint) -> None:
    """Its streams continue on the prefill engine, which drafts nothing, until the replica is replaced."""
    requests = session.requests_for(endpoint.url, 40, seed=0)
    outcome = run.run(endpoint.url, endpoint.process.pid, requests, [(Kind.DECODE,)], concurrency=6, seed=0)
    assert outcome.holds, report.failures(outcome)
