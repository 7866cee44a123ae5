"""Hugging Face export format of models from scratch: architecture, configuration and parameter names.

Dense it is a Llama and a mixture of experts is a Mixtral; neither has a shared expert, Qwen2-MoE has.
"""

from typing import Any

import torch
from torch import Tensor

from strata.platform.errors import UserError, shown
from strata.platform.model_families.families import mixtral
from strata.platform.recipe import ArchitectureSection, ModelSection, MoESection

LLAMA = ArchitectureSection()


def require_exportable(section: ModelSection) -> None:
    """Refuses switches of other families in a model from scratch: Llama, Mixtral and Qwen2-MoE do not have them."""
    if section.family is not None:
        return
    plain = MoESection(experts=2)
    set_here = {f"architecture.{key}": value for key, value in section.architecture if value != getattr(LLAMA, key)}
    set_here |= {
        f"moe.{key}": getattr(section.moe, key)
        for key in ("normalize", "bias", "dense_layers", "dense_ffn")
        if section.moe and getattr(section.moe, key) != getattr(plain, key)
    }
    for key, value in set_here.items():
        if key != "architecture.head_dim":  # which all three do have
            cause = (
                f"model.{key}={shown(value)} is a switch of imported models, with which no model from scratch can be exported."
            )
            raise UserError(cause, f"Remove model.{key}, or start from a model that has it: model.from.")


def config(section: ModelSection) -> dict[str, Any]:
    require_exportable(section)
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
    return name if section.moe is None or section.moe.shared_ffn else mixtral.tensor_name(name)


def biases(section: ModelSection) -> dict[str, Tensor]:
    """Qwen2-MoE's attention has biases and ours has none. `qkv_bias: false` would say so, but vLLM 0.29 does not read it: it
    loads a folder without biases and computes with what the memory held before. So they are exported as zeros."""
    if section.moe is None or not section.moe.shared_ffn:
        return {}
    widths = {
        "q": section.heads * section.head_dim,
        "k": section.kv_heads * section.head_dim,
        "v": section.kv_heads * section.head_dim,
    }
    return {
        f"model.layers.{layer}.self_attn.{kind}_proj.bias": torch.zeros(width)
        for layer in range(section.layers)
        for kind, width in widths.items()
    }
