"""Hugging Face export format: the architecture, configuration and parameter names under which it is exported.

Dense it is a Llama and a mixture of experts is a Mixtral; neither has a shared expert, Qwen2-MoE has.
"""

from typing import Any

import torch
from torch import Tensor

from strata.platform.recipe import ModelSection, MoESection

MIXTRAL_NAMES = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


def config(section: ModelSection) -> dict[str, Any]:
    common = {
        "hidden_size": section.hidden,
        "intermediate_size": section.ffn,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.kv_heads,
        "head_dim": section.head_dim,
        "vocab_size": section.vocab,
        "max_position_embeddings": section.context,
        "rms_norm_eps": section.norm_eps,
        "rope_theta": section.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": section.rope_theta},  # read by transformers 5
        "tie_word_embeddings": section.tie_embeddings,
        "hidden_act": "silu",
    }
    if section.moe is None:
        return llama_config() | common
    return (qwen2_moe_config(section.moe, section.ffn) if section.moe.shared_ffn else mixtral_config(section.moe)) | common


def llama_config() -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}


def mixtral_config(moe: MoESection) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "sliding_window": None,
    }


def qwen2_moe_config(moe: MoESection, ffn: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": True,
        "moe_intermediate_size": ffn,
        "shared_expert_intermediate_size": moe.shared_ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "qkv_bias": True,
    }


def export_name(section: ModelSection, name: str) -> str:
    """Our names are Llama's and Qwen2-MoE's; Mixtral's blocks have names of their own."""
    if section.moe is None or section.moe.shared_ffn or ".mlp." not in name:
        return name
    for ours, theirs in MIXTRAL_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def biases(section: ModelSection) -> dict[str, Tensor]:
    """Qwen2-MoE's attention has biases and ours has none. `qkv_bias: false` would say so, but vLLM 0.29 does not read it: it
    loads a folder without biases and computes with what the memory held before. So they are exported as zeros."""
    if section.moe is None or not section.moe.shared_ffn:
        return {}
    widths = {"q": section.hidden, "k": section.kv_heads * section.head_dim, "v": section.kv_heads * section.head_dim}
    return {
        f"model.layers.{layer}.self_attn.{kind}_proj.bias": torch.zeros(width)
        for layer in range(section.layers)
        for kind, width in widths.items()
    }
