"""Model folder of a given shape with random weights: the speed of fine-tuning does not depend on the weights."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from strata.planner.catalogue.shape import Shape
from strata.platform.errors import UserError

PERIOD = 2**22 + 1  # numbers that are drawn, and then repeated: drawing billions takes minutes


def write(folder: Path, shape: Shape) -> None:
    """Writes a Llama in bf16."""
    if shape.experts or shape.latent or shape.biases or shape.query_biases or not shape.gated:
        raise UserError(
            f"{shape.name} is no dense Llama, the one kind that gets random weights.", "Give a model's folder instead."
        )
    folder.mkdir(parents=True)
    drawn = torch.empty(PERIOD).normal_(std=0.02, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {name: _filled(size, drawn) for name, size in _sizes(shape).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=2))


def _filled(size: tuple[int, ...], drawn: Tensor) -> Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=drawn.dtype)
    count = math.prod(size)
    return drawn.repeat(math.ceil(count / len(drawn)))[:count].clone().view(size)


def _sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (shape.ffn, hidden),
        "mlp.up_proj": (shape.ffn, hidden),
        "mlp.down_proj": (hidden, shape.ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden), "model.norm.weight": (hidden,)}
    for number in range(shape.layers):
        sizes |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
    return sizes if shape.tied else sizes | {"lm_head.weight": (shape.vocab, hidden)}


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
