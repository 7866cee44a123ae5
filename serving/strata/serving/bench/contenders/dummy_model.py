"""Llama of the recipe's shape with random weights, for benchmarks: serving speed does not depend on the weights."""

import json
import math
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection, Recipe

UNKNOWN = "<unk>"
END = "<end>"


def write(folder: Path, recipe: Recipe) -> None:
    model = recipe.model
    if model.moe is not None:
        raise UserError(
            "A model of random weights is a dense Llama.", "Use a recipe without model.moe, or name a model folder (--model)."
        )
    dtype = recipe.serve.dtype
    if dtype == "auto":
        dtype = "float32" if recipe.serve.device == "cpu" else "bfloat16"
    folder.mkdir(parents=True)
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(_config(model) | special | {"dtype": dtype}, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2))
    _write_tokenizer(folder, model)
    _write_weights(folder / "model.safetensors", model, dtype)


def _config(model: ModelSection) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _write_tokenizer(folder: Path, model: ModelSection) -> None:
    """Writes a tokenizer with one word per id. Text made from ids encodes to the same ids, and `vllm bench serve` sends text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {UNKNOWN: 0, END: 1} | {f"w{number}": number for number in range(2, model.vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "unk_token": UNKNOWN,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _write_weights(file: Path, model: ModelSection, dtype: str) -> None:
    """Writes random weights: a few million numbers, repeated with a period that divides no row. Drawing a billion takes 30 s."""
    import torch
    from safetensors.torch import save_file

    kind: torch.dtype = getattr(torch, dtype)
    drawn = torch.empty(2**22 + 1).normal_(std=0.02).to(kind)

    def random(*shape: int) -> torch.Tensor:
        size = math.prod(shape)
        return drawn.repeat(math.ceil(size / len(drawn)))[:size].clone().view(shape)

    def ones() -> torch.Tensor:
        return torch.ones(model.hidden, dtype=kind)

    keys = model.kv_heads * model.head_dim
    tensors = {"model.embed_tokens.weight": random(model.vocab, model.hidden)}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": random(model.hidden, model.hidden),
            f"{at}.self_attn.k_proj.weight": random(keys, model.hidden),
            f"{at}.self_attn.v_proj.weight": random(keys, model.hidden),
            f"{at}.self_attn.o_proj.weight": random(model.hidden, model.hidden),
            f"{at}.mlp.gate_proj.weight": random(model.ffn, model.hidden),
            f"{at}.mlp.up_proj.weight": random(model.ffn, model.hidden),
            f"{at}.mlp.down_proj.weight": random(model.hidden, model.ffn),
            f"{at}.input_layernorm.weight": ones(),
            f"{at}.post_attention_layernorm.weight": ones(),
        }
    tensors["model.norm.weight"] = ones()
    if not model.tie_embeddings:
        tensors["lm_head.weight"] = random(model.vocab, model.hidden)
    save_file(tensors, file, {"format": "pt"})
