"""A model's shape from its Hugging Face config.json."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from strata.planner.shape import Experts, Latent, Shape
from strata.platform.errors import UserError


def from_config(config: dict[str, Any], name: str) -> Shape:
    """From a Hugging Face config.json. Biases are taken as the family usually has them and norms of queries and keys are left
    out: together below a thousandth of the parameters."""
    family = config.get("model_type")
    if family not in FAMILIES:
        cause = f"The config of {name} has model_type {family!r}, which the planner cannot read."
        raise UserError(cause, f"It reads {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[family](_Config(config, name))


@dataclass(frozen=True)
class _Config:
    values: dict[str, Any]
    name: str

    def need(self, key: str) -> int:
        value = self.values.get(key)
        if value is None:
            raise UserError(f"The config of {self.name} lacks '{key}'.", "Add it to config.json.")
        if not isinstance(value, int) or value < 0:
            raise UserError(f"{key}={value!r} in the config of {self.name} is not a count.", "Mend config.json.")
        return value

    def get(self, key: str, otherwise: int) -> int:
        """Configs write null for what has its usual value."""
        return otherwise if self.values.get(key) is None else self.need(key)

    def refuse_unless(self, fine: bool, key: str) -> None:
        if not fine:
            cause = f"{key}={self.values[key]!r} in the config of {self.name} puts dense layers among the sparse ones."
            raise UserError(cause, "The planner knows dense layers only before the sparse ones: change it.")


def _llama(config: _Config, query_biases: bool = False, experts: Experts | None = None) -> Shape:
    hidden, heads = config.need("hidden_size"), config.need("num_attention_heads")
    return Shape(
        name=config.name,
        layers=config.need("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim", hidden // heads),
        ffn=config.need("intermediate_size"),
        vocab=config.need("vocab_size"),
        context=config.need("max_position_embeddings"),
        tied=bool(config.values.get("tie_word_embeddings", False)),
        query_biases=query_biases,
        experts=experts,
    )


def _qwen2(config: _Config) -> Shape:
    return _llama(config, query_biases=True)


def _qwen3(config: _Config) -> Shape:
    config.need("head_dim")  # its usual value, 128, has nothing to do with hidden / heads
    return _llama(config)


def _qwen2_moe(config: _Config) -> Shape:
    return _llama(config, query_biases=True, experts=_qwen_experts(config, config.need("shared_expert_intermediate_size")))


def _qwen3_moe(config: _Config) -> Shape:
    return _llama(config, experts=_qwen_experts(config, shared=0))


def _qwen_experts(config: _Config, shared: int) -> Experts:
    dense = sorted(config.values.get("mlp_only_layers") or [])
    config.refuse_unless(dense == list(range(len(dense))), "mlp_only_layers")
    config.refuse_unless(config.get("decoder_sparse_step", 1) == 1, "decoder_sparse_step")
    return Experts(
        count=config.need("num_experts"),
        top_k=config.need("num_experts_per_tok"),
        ffn=config.need("moe_intermediate_size"),
        shared_ffn=shared,
        dense_layers=len(dense),
    )


def _mixtral(config: _Config) -> Shape:
    ffn = config.need("intermediate_size")
    return _llama(config, experts=Experts(config.need("num_local_experts"), config.need("num_experts_per_tok"), ffn))


def _deepseek(config: _Config) -> Shape:
    config.refuse_unless(config.get("moe_layer_freq", 1) == 1, "moe_layer_freq")
    plain, rotary, width = (config.need(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "moe_intermediate_size"))
    experts = Experts(
        count=config.need("n_routed_experts"),
        top_k=config.need("num_experts_per_tok"),
        ffn=width,
        shared_ffn=config.get("n_shared_experts", 0) * width,
        dense_layers=config.need("first_k_dense_replace"),
    )
    latent = Latent(config.get("q_lora_rank", 0), config.need("kv_lora_rank"), plain, rotary, config.need("v_head_dim"))
    shape = _llama(config, experts=experts)
    return replace(shape, kv_heads=shape.heads, head_dim=plain + rotary, latent=latent)


def _gpt_neox(config: _Config) -> Shape:
    return replace(_llama(config), gated=False, biases=True)


def _gpt2(config: _Config) -> Shape:
    hidden = config.need("n_embd")
    values = {
        "hidden_size": hidden,
        "num_hidden_layers": config.need("n_layer"),
        "num_attention_heads": config.need("n_head"),
        "intermediate_size": config.get("n_inner", 4 * hidden),
        "vocab_size": config.need("vocab_size"),
        "max_position_embeddings": config.need("n_positions"),
        "tie_word_embeddings": config.values.get("tie_word_embeddings", True),
    }
    return replace(_gpt_neox(_Config(values, config.name)), positions=True)


FAMILIES: dict[str, Callable[[_Config], Shape]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
