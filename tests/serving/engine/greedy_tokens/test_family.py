"""Greedy tokens of imported models that are exported again: vLLM equals `transformers`, for each family that vLLM serves on CPUs.

Models are the rows of `tiny_models.py` with heads as wide as vLLM's CPU kernels need, and without YaRN, whose attention factor
vLLM does not read.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ROWS

from strata.platform import recipe_file
from strata.serving.spec import EngineSpec, Network

from .test_moe import GENERATE

pytestmark = pytest.mark.rotation

# A mixture of experts first: the process keeps the groups of its first model, and a dense one has none for experts.
FAMILIES = ("mixtral", "qwen3_moe", "llama", "mistral-full", "qwen2", "qwen3", "olmo2", "gemma3")
WIDER = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 512}
PROMPTS = [[1, 2, 3], [7] * 20, list(range(40, 70))]
NEW = 12


def save(name: str, folder: Path) -> Any:
    import transformers

    row = ROWS[name]
    torch.manual_seed(1)
    kind = getattr(transformers, row.architecture)
    wide = {key: value for key, value in WIDER.items() if key in row.config or key in ("head_dim",)}
    values = row.config | wide | {"hidden_size": 128, "num_attention_heads": 4}
    if values.get("rope_parameters", {}).get("rope_type") == "yarn":
        del values["rope_parameters"]
    config = kind.config_class(**values)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder)
    return model


def tokens_of(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    models = {name: save(name, tmp_path / name) for name in FAMILIES}
    spec = EngineSpec.of("decode", recipe_file.load("laptop").serve, tmp_path / "llama", "m", Network.within(one_machine=True))
    settings = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": len(PROMPTS), "max_model_len": 64}
    answer = tmp_path / "tokens.json"
    task = json.dumps([[str(tmp_path / name) for name in FAMILIES], settings, PROMPTS, NEW, str(answer)])
    environment = os.environ | spec.environment()
    done = subprocess.run([sys.executable, "-c", GENERATE, task], env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = dict(zip(FAMILIES, json.loads(answer.read_text()), strict=True))
    for name, model in models.items():
        expected = [tokens_of(model, prompt) for prompt in PROMPTS]
        assert found[name] == expected, name
        assert len({token for line in expected for token in line}) > 2, name  # no model that says one thing to everything
