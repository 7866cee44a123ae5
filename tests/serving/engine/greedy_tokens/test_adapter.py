"""An endpoint with `serve.adapter=apart`: greedy tokens of the adapter are those of the merged model, and of `base` the base's.

Prompts are prefilled on the other engine, and one prompt goes to both models: neither may read the other's KV blocks.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support import STRATA

from strata.platform import ports, recipe_file
from strata.platform.recipe import LoraSection
from strata.serving import client
from strata.training.checkpoint import adapter
from strata.training.checkpoint.export import write_folder
from strata.training.data import tokenizer

from .test_moe import decisive

pytestmark = pytest.mark.rotation

NEW = 12
LORA = LoraSection(rank=4, alpha=8)
PROMPTS = [list(range(100, 300)), [7, 8, 9] * 20]


def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Base model, and an export with the adapter in it."""
    base, export = tmp_path / "model", tmp_path / "tuned"
    section = recipe_file.load("laptop", ["model.context=256"]).model
    weights = decisive(section).state_dict()
    words = tokenizer.train(["a few words of a text"] * 3, 400)
    for folder in (base, export):
        folder.mkdir()
        tokenizer.save(words, folder, section.context)
    write_folder(base, weights, section, torch.float32)
    imported = recipe_file.load("laptop", [f"model.from={base}", "model.context=256"]).model
    names = adapter.adapted(imported, LORA)
    noise = torch.Generator().manual_seed(2)
    parts: dict[str, Any] = {}
    for name in names:
        outputs, inputs = weights[name].shape
        path = name.removesuffix(".weight")
        parts[f"{path}.lora_A.weight"] = torch.randn(LORA.rank, inputs, generator=noise) * 0.1
        parts[f"{path}.lora_B.weight"] = torch.randn(outputs, LORA.rank, generator=noise) * 0.1
    adapter.write(export / "adapter", parts.__getitem__, imported, LORA)
    merged = adapter.merging((weights | parts).__getitem__, names, LORA)
    write_folder(export, {name: merged(name) for name in weights}, section, torch.float32)
    return base, export


def tokens_of(folder: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def ask(http: httpx.Client, model: str | None, prompt: list[int]) -> tuple[list[int], str, str]:
    """Tokens, name of the model and place of the prefill."""
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body | ({"model": model} if model else {}))
    assert answer.status_code == 200, answer.text
    tree = answer.json()
    return tree["choices"][0]["token_ids"], tree["model"], answer.headers["x-strata-prefill"]


def test_adapter_and_base_answer_by_name(tmp_path: Path) -> None:
    base, export = folders(tmp_path)
    expected = {"tuned": tokens_of(export), "base": tokens_of(base)}
    assert all(one != other for one, other in zip(expected["tuned"], expected["base"], strict=True))
    held, output = ports.reserve(), tmp_path / "serve.out"
    command = [STRATA, "serve", "--model", str(export), "serve.adapter=apart", f"serve.port={held.port}"]
    with output.open("wb") as stream:
        environment = os.environ | {"STRATA_HOME": str(tmp_path)}
        process = subprocess.Popen([*command, "serve.remote_prefill.min_tokens=0"], env=environment, stdout=stream, stderr=stream)
    try:
        try:
            client.wait_until_ready(held.url, process, 300)
        except client.NotReady as error:
            raise AssertionError(f"{error.cause}\n{output.read_text()}") from None
        with httpx.Client(base_url=held.url, timeout=60) as http:
            assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tuned", "base"]
            for number, prompt in enumerate(PROMPTS):
                for asked, name in (("tuned", "tuned"), ("base", "base"), (None, "tuned"), ("base", "base")):
                    tokens, answered, place = ask(http, asked, prompt)
                    assert (tokens, answered) == (expected[name][number], name), (asked, place)
                assert place.startswith("remote")
            refused = http.post("/v1/completions", json={"model": "other", "prompt": [1], "max_tokens": 1})
            assert refused.status_code == 404 and "'tuned' and 'base'" in refused.text
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
