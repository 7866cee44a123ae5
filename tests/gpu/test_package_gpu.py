"""AOTInductor packages compiled for CUDA, compared with transformers on the GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from strata.training.deployment import package, prompts, runners
from strata.training.deployment.check import compare
from strata.training.deployment.step import cache_shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_greedy_tokens_of_twenty_prompts(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=8))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.2)
    model = model.to("cuda", dtype).eval().requires_grad_(False)
    shape = cache_shape(model)
    run = runners.package_runner(package.write(model, shape, tmp_path / "model.pt2"))
    result = compare(model, run, shape, prompts.from_vocabulary(model.config, 20, 64), 16, lambda: None)
    assert result.tokens == 320 and not result.differences, result.disagreements
    assert len(result.ties) < (1 if dtype == torch.float32 else 32)
