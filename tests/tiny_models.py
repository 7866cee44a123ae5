"""Tiny configurations of every model family that training can start from, one row for each form worth a test.

Widths are small and odd values are chosen: windows shorter than the test's sequences, heads wider than hidden / heads, scalings
and bounds that change results.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
LAYERS = {"num_hidden_layers": 4}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = LAYERS | {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5, "final_logit_softcapping": 3.0}


@dataclass(frozen=True)
class Tiny:
    """`values` are those of the config.json beside `COMMON`."""

    family: str
    architecture: str
    values: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return deepcopy(COMMON | self.values)  # transformers changes what it is given


ROWS = {
    "llama": Tiny("llama", "LlamaForCausalLM", {"rope_theta": 100.0, "rms_norm_eps": 1e-3}),
    "llama-3": Tiny(
        "llama",
        "LlamaForCausalLM",
        {"head_dim": 16, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16, "rope_theta": 50.0}},
    ),
    "llama-biases": Tiny("llama", "LlamaForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama-linear": Tiny("llama", "LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 200.0}),
    "llama-dynamic": Tiny("llama", "LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}}),
    "llama-yarn": Tiny("llama", "LlamaForCausalLM", {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}}),
    "llama-all-heads": Tiny("llama", "LlamaForCausalLM", {"num_key_value_heads": None, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral": Tiny("mistral", "MistralForCausalLM", {"sliding_window": 7, "head_dim": 16}),
    "mistral-full": Tiny("mistral", "MistralForCausalLM", {"sliding_window": None}),
    "smollm3": Tiny("smollm3", "SmolLM3ForCausalLM", LAYERS | {"no_rope_layers": [1, 0, 0, 1], "rope_parameters": YARN}),
    "smollm3-sliding": Tiny(
        "smollm3",
        "SmolLM3ForCausalLM",
        LAYERS | {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2, "tie_word_embeddings": False},
    ),
    "qwen2": Tiny("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True, "sliding_window": 6}),
    "qwen2-sliding": Tiny("qwen2", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": Tiny("qwen3", "Qwen3ForCausalLM", {"head_dim": 12, "rope_parameters": YARN | {"attention_factor": 1.3}}),
    "qwen3-sliding": Tiny(
        "qwen3",
        "Qwen3ForCausalLM",
        {
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3_moe": Tiny("qwen3_moe", "Qwen3MoeForCausalLM", MOE | {"head_dim": 12, "mlp_only_layers": [1]}),
    "qwen3_moe-sliding": Tiny(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6},
    ),
    "qwen2_moe": Tiny("qwen2_moe", "Qwen2MoeForCausalLM", MOE | {"shared_expert_intermediate_size": 40}),
    "qwen2_moe-sliding": Tiny(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        MOE
        | LAYERS
        | {
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
            "mlp_only_layers": [3],
        },
    ),
    "mixtral": Tiny("mixtral", "MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9}),
    "olmo2": Tiny("olmo2", "Olmo2ForCausalLM", {"rope_theta": 300.0}),
    "olmo2-biases": Tiny("olmo2", "Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": None}),
    "gemma2": Tiny("gemma2", "Gemma2ForCausalLM", GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma3": Tiny(
        "gemma3",
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3-untied": Tiny("gemma3", "Gemma3ForCausalLM", GEMMA | {"tie_word_embeddings": False, "sliding_window_pattern": 2}),
    "gpt_oss": Tiny(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 12,
            "sliding_window": 6,
            "rope_parameters": YARN | {"truncate": False, "beta_fast": 4.0},
        },
    ),
}
