"""Greedy tokens of exported mixtures of experts: vLLM equals `transformers`.

The sizes and settings are those of `laptop-moe`. vLLM's loaders of Mixtral and Qwen2-MoE differ, and neither reports every
missing weight.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from strata.platform import recipe_file
from strata.platform.recipe import ModelSection
from strata.serving.spec import EngineSpec, Network
from strata.training.checkpoint.export import write_folder
from strata.training.model.llama import Llama

pytestmark = pytest.mark.rotation

PROMPTS = [[1, 2, 3], [7] * 20, list(range(40, 80)), [500, 11]]
NEW = 16

# In one process as our engines are (`OneProcessEngine`), and one after the other: importing vLLM takes longer than a model.
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
folders, settings, prompts, new, answer = json.loads(sys.argv[1])
greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
tokens = []
for folder in folders:
    engine = LLM(folder, skip_tokenizer_init=True, distributed_executor_backend="uni", **settings)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    tokens.append([list(output.outputs[0].token_ids) for output in outputs])
json.dump(tokens, open(answer, "w"))
"""


def decisive(section: ModelSection) -> Llama:
    """Scales weights so that no two logits, of tokens or of experts, are within rounding."""
    model, noise = Llama(section), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return model


def tokens_of_transformers(folder: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    mixtral = recipe_file.load("laptop-moe").model
    assert mixtral.moe is not None
    qwen2 = mixtral.model_copy(update={"moe": mixtral.moe.model_copy(update={"shared_ffn": 96}), "tie_embeddings": False})
    folders = []
    for name, section in {"mixtral": mixtral, "qwen2_moe": qwen2}.items():
        folders.append(tmp_path_factory.mktemp(name))
        write_folder(folders[-1], decisive(section).state_dict(), section, torch.float32)
    return folders


def test_greedy_tokens_equal_those_of_transformers(exports: list[Path], tmp_path: Path) -> None:
    spec = EngineSpec.of("decode", recipe_file.load("laptop-moe").serve, exports[0], "moe", Network.within(one_machine=True))
    settings = {"dtype": spec.dtype, "enforce_eager": spec.eager, "max_num_seqs": len(PROMPTS)}
    answer = tmp_path / "tokens.json"
    task = json.dumps([[str(folder) for folder in exports], settings, PROMPTS, NEW, str(answer)])
    environment = os.environ | spec.environment()
    done = subprocess.run([sys.executable, "-c", GENERATE, task], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for folder, tokens in zip(exports, json.loads(answer.read_text()), strict=True):
        expected = tokens_of_transformers(folder)
        assert tokens == expected, folder
        assert len({token for line in expected for token in line}) > NEW  # no model that says one thing to everything
