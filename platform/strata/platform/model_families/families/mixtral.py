"""Mixtral: a mixture of experts in every layer, under names of its own."""

from typing import Any

from strata.platform.model_families.config import Config
from strata.platform.model_families.decoder import activation, decoder, window_of_all_layers
from strata.platform.model_families.family import Family, Location, Shape
from strata.platform.recipe import ModelSection

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
NAMES = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


def section(config: Config) -> dict[str, Any]:
    architecture = activation(config) | window_of_all_layers(config, config.optional_whole("sliding_window"))
    experts = config.whole("num_local_experts", "num_experts")
    return decoder(config, architecture, moe={"experts": experts, "top_k": config.whole("num_experts_per_tok")})


def locate(name: str, shape: Shape, section: ModelSection) -> Location:
    return Location(tensor_name(name), shape)


def tensor_name(name: str) -> str:
    if ".mlp." in name:
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
    return name


FAMILY = Family("mixtral", ("MixtralForCausalLM",), DEFAULTS, section, locate)
