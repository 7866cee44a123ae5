"""KV transfer on one GPU: decoding continues from another engine's prefill as if the engine had prefilled itself."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from strata.platform import ports, recipe_file
from strata.serving import client
from strata.serving.bench.contenders import dummy_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("vllm")
pytest.importorskip("ray")

SHAPE = ("model.layers=4", "model.hidden=512", "model.heads=8", "model.kv_heads=2", "model.ffn=1024", "model.vocab=2048")
POOLS = ("serve.prefill.gpu_memory=0.1", "serve.decode.gpu_memory=0.1", "serve.remote_prefill.when=always")
RECIPE = (*SHAPE, "model.context=4096", *POOLS)
LENGTHS = (100, 300, 600, 1000)  # less than one block, and several blocks with a remainder
START_LIMIT_S = 300
LIKELIEST = 20
# Difference of log-probabilities. In bf16, this model's top twenty differ by up to 0.013 at these lengths; with a block of
# another prompt, they differ by 0.09 and more.
APART = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("served") / "model"
    dummy_model.write(written, recipe_file.load("h200", list(RECIPE)))
    return written


@pytest.fixture(scope="module", params=["vllm", "strata"])
def url(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    held, output = ports.reserve(), folder.parent / f"serve-{request.param}.out"
    changes = [*RECIPE, f"serve.kernels={request.param}", f"serve.port={held.port}"]
    words = ["serve", "--model", str(folder), "--recipe", "h200", *changes]
    with output.open("wb") as stream:
        process = subprocess.Popen([sys.executable, "-m", "strata.platform.cli", *words], stdout=stream, stderr=stream)
    try:
        client.wait_until_ready(held.url, process, START_LIMIT_S)
        yield held.url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        held.release()


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    return loaded


def test_transferred_prompts_have_the_log_probabilities_of_the_reference(url: str, reference: torch.nn.Module) -> None:
    draw = random.Random(0)
    for length in LENGTHS:
        prompt = draw.choices(range(2, 2048), k=length)
        where, choices = request(url, prompt)
        assert where.startswith("remote")
        check(reference, prompt, choices)


def test_prompts_mixed_with_decodes_have_the_log_probabilities_of_the_reference(url: str, reference: torch.nn.Module) -> None:
    """A prompt with two answers cannot be transferred. The decode engine prefills it itself, in steps that mix prompt chunks and
    decodes."""
    draw = random.Random(1)
    prompts = [draw.choices(range(2, 2048), k=draw.randrange(1, 1200)) for _ in range(48)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: request(url, prompt, n=2, max_tokens=24), prompts))
    for prompt, (where, choices) in zip(prompts, answers, strict=True):
        assert where == "local; reason=several-sequences" and len(choices) == 2
        check(reference, prompt, choices)


def request(url: str, prompt: list[int], n: int = 1, max_tokens: int = 4) -> tuple[str, list[dict[str, Any]]]:
    """The place of the prefill, and the answers."""
    name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": name, "prompt": prompt, "max_tokens": max_tokens, "n": n, "logprobs": LIKELIEST}
    body |= {"temperature": 0 if n == 1 else 1}  # several greedy answers would be identical
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.headers["x-strata-prefill"], response.json()["choices"]


def check(reference: torch.nn.Module, prompt: list[int], choices: list[dict[str, Any]]) -> None:
    for choice in choices:
        tokens, rated = choice["token_ids"], choice["logprobs"]["top_logprobs"]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).cpu()
        for step, likeliest in enumerate(rated):
            assert len(likeliest) >= LIKELIEST
            for token, rating in likeliest.items():
                found = float(expected[step, int(token.removeprefix("token_id:"))])
                assert abs(found - rating) < APART, (len(prompt), step, token)
