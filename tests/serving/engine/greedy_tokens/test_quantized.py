"""Greedy tokens of quantized folders in real vLLM engines on the CPU, followed by the same folders in transformers.

Activations of 8 bits turn the rounding of 16 bits into other tokens, in fp8 up to a fifth of them on this random model. So the
engine may differ from transformers in 32 bits about as much as transformers in 16 bits does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from strata.platform import recipe_file
from strata.serving.models import quantization_check
from strata.serving.spec import EngineSpec, Network
from strata.training.data import tokenizer
from strata.training.quantization import model_folder
from strata.training.quantization.formats import FORMATS
from strata.training.quantization.quantize import Request, quantize
from strata.training.quantization.source import resolve

from .test_family import save
from .test_moe import GENERATE

pytestmark = pytest.mark.rotation

PROMPTS = [list(range(begin, begin + 24)) for begin in range(0, 480, 40)]
NEW = 16


def test_engines_choose_the_tokens_of_the_folder_in_transformers(tmp_path: Path) -> None:
    source = tmp_path / "llama"
    save("llama", source)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(str(a * b % 97) for b in range(60)) for a in range(200)))
    tokenizer.save(tokenizer.train([text.read_text()], 512), source, 64)
    folders = [
        quantize(resolve(str(source)), Request(each, tmp_path / f"{name}", text, 16, None, head, 0, "cpu"), Console(quiet=True))
        for each in FORMATS.values()
        for name, head in ((each.name, False), (f"{each.name}-head", True))
        if each.name != "w8a8-int8" or quantization_check.int8_is_exact()
    ]
    spec = EngineSpec.of("decode", recipe_file.load("laptop").serve, source, "m", Network.within(one_machine=True))
    settings = {"dtype": "bfloat16", "enforce_eager": True, "max_num_seqs": len(PROMPTS), "max_model_len": 64}
    answer = tmp_path / "tokens.json"
    task = json.dumps([list(map(str, folders)), settings, PROMPTS, NEW, str(answer)])
    environment = os.environ | spec.environment()
    done = subprocess.run([sys.executable, "-c", GENERATE, task], env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for folder, tokens in zip(folders, json.loads(answer.read_text()), strict=True):
        model = model_folder.load(folder, torch.device("cpu"), quantized=True)
        narrow = model_folder.load(folder, torch.device("cpu"), quantized=True).to(torch.bfloat16)
        gaps, allowed = gaps_of(model, tokens), gaps_of(model, [tokens_of(narrow, prompt) for prompt in PROMPTS])
        equal, expected = (float((each == 0).float().mean()) for each in (gaps, allowed))
        print(f"{folder.name}: {equal:.3f} of {expected:.3f} equal, mean gap {gaps.mean():.4f} of {allowed.mean():.4f}")
        assert equal > expected - 0.1, folder.name
        assert gaps.mean() < 2 * allowed.mean() + 0.01, folder.name  # a different token was nearly as likely


def gaps_of(model: Any, tokens: list[list[int]]) -> torch.Tensor:
    return torch.cat([gap_of(model, prompt, new) for prompt, new in zip(PROMPTS, tokens, strict=True)])


def tokens_of(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


def gap_of(model: Any, prompt: list[int], new: list[int]) -> torch.Tensor:
    """Distance of the engine's tokens from the largest logit of transformers, in standard deviations of the logits."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *new[:-1]]])).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
    return (logits.amax(1) - chosen) / logits.std(1)
