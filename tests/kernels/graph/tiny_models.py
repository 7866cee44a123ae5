"""Two-layer models of transformers, with random weights."""

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = ("llama", "qwen3", "mixtral")


def tiny(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    if family == "llama":  # tied; the others are not
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True, **more))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, **more))
    else:
        # transformers' grouped product has no traceable gradient on a CPU.
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, **experts, **more))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a forgotten weight
                parameter.uniform_(0.5, 1.5)
    return model


def batch(rows: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and labels of which a part is ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(96, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, : tokens // 3] = -100
    return ids, labels
