"""A model's shape from its Hugging Face config.json."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from strata.planner.catalogue.check_shape import check_shape
from strata.planner.catalogue.shape import Experts, Latent, Shape
from strata.planner.ranges import EXPERTS, LATENT, SHAPE, Range
from strata.platform.errors import UserError, shown


def from_config(config: dict[str, Any], name: str) -> Shape:
    """From a Hugging Face config.json. Biases are taken as the family usually has them and norms of queries and keys are left
    out: together below a thousandth of the parameters."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        cause = f"The config of {name} has model_type {shown(repr(family))}, which the planner cannot read."
        raise UserError(cause, f"It reads {', '.join(sorted(FAMILIES))}.")
    return check_shape(FAMILIES[family](_Config(config, name)))


@dataclass(frozen=True)
class _Config:
    values: dict[str, Any]
    name: str

    def need(self, key: str, within: Range) -> int:
        value = self.values.get(key)
        if value is None:
            raise UserError(f"The config of {self.name} lacks '{key}'.", "Add it to config.json.")
        if isinstance(value, bool) or not isinstance(value, int) or value not in within:
            raise UserError(
                f"{key}={shown(repr(value))} in the config of {self.name} is not a whole number in its range: {within}.",
                f"Correct {key} in config.json.",
            )
        return value

    def get(self, key: str, otherwise: int, within: Range) -> int:
        """Configs write null for what has its usual value."""
        return otherwise if self.values.get(key) is None else self.need(key, within)

    def flag(self, key: str, otherwise: bool) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise UserError(
                f"{key}={shown(repr(value))} in the config of {self.name} is neither true nor false.",
                f"Correct {key} in config.json.",
            )
        return otherwise if value is None else value

    def refuse_unless(self, fine: bool, key: str) -> None:
        if not fine:
            cause = f"{key}={shown(repr(self.values[key]))} in the config of {self.name} puts dense layers among the sparse ones."
            raise UserError(cause, "The planner knows dense layers only before the sparse ones: change it.")


def _llama(config: _Config, query_biases: bool = False, experts: Experts | None = None) -> Shape:
    hidden, heads = config.need("hidden_size", SHAPE["hidden"]), config.need("num_attention_heads", SHAPE["heads"])
    if config.values.get("head_dim") is None and hidden % heads:
        raise UserError(
            f"{heads} heads do not divide the {hidden} hidden numbers in the config of {config.name}, which has no head_dim.",
            "Correct the number of heads or the hidden size in config.json, or add head_dim.",
        )
    return Shape(
        name=config.name,
        layers=config.need("num_hidden_layers", SHAPE["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads, SHAPE["kv_heads"]),
        head_dim=config.get("head_dim", hidden // heads, SHAPE["head_dim"]),
        ffn=config.need("intermediate_size", SHAPE["ffn"]),
        vocab=config.need("vocab_size", SHAPE["vocab"]),
        context=config.need("max_position_embeddings", SHAPE["context"]),
        tied=config.flag("tie_word_embeddings", False),
        query_biases=query_biases,
        experts=experts,
    )


def _qwen2(config: _Config) -> Shape:
    return _llama(config, query_biases=True)


def _qwen3(config: _Config) -> Shape:
    config.need("head_dim", SHAPE["head_dim"])  # its usual value, 128, has nothing to do with hidden / heads
    return _llama(config)


def _qwen2_moe(config: _Config) -> Shape:
    return _llama(
        config,
        query_biases=True,
        experts=replace(
            _qwen_experts(config, config.need("shared_expert_intermediate_size", EXPERTS["shared_ffn"])), shared_gate=True
        ),
    )


def _qwen3_moe(config: _Config) -> Shape:
    return _llama(config, experts=_qwen_experts(config, shared=0))


def _qwen_experts(config: _Config, shared: int) -> Experts:
    dense = config.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    first = isinstance(dense, list) and len(dense) in EXPERTS["dense_layers"] and all(n in dense for n in range(len(dense)))
    config.refuse_unless(first, "mlp_only_layers")
    config.refuse_unless(config.get("decoder_sparse_step", 1, SHAPE["layers"]) == 1, "decoder_sparse_step")
    return Experts(
        count=config.need("num_experts", EXPERTS["count"]),
        top_k=config.need("num_experts_per_tok", EXPERTS["top_k"]),
        ffn=config.need("moe_intermediate_size", EXPERTS["ffn"]),
        shared_ffn=shared,
        dense_layers=len(dense),
    )


def _mixtral(config: _Config) -> Shape:
    count, top_k = config.need("num_local_experts", EXPERTS["count"]), config.need("num_experts_per_tok", EXPERTS["top_k"])
    return _llama(config, experts=Experts(count, top_k, config.need("intermediate_size", EXPERTS["ffn"])))


def _deepseek(config: _Config) -> Shape:
    config.refuse_unless(config.get("moe_layer_freq", 1, SHAPE["layers"]) == 1, "moe_layer_freq")
    width = config.need("moe_intermediate_size", EXPERTS["ffn"])
    experts = Experts(
        count=config.need("n_routed_experts", EXPERTS["count"]),
        top_k=config.need("num_experts_per_tok", EXPERTS["top_k"]),
        ffn=width,
        shared_ffn=config.get("n_shared_experts", 0, Range(0, EXPERTS["count"].most)) * width,
        dense_layers=config.need("first_k_dense_replace", EXPERTS["dense_layers"]),
    )
    plain, rotary = (
        config.need("qk_nope_head_dim", LATENT["plain_dim"]),
        config.need("qk_rope_head_dim", LATENT["rotary_dim"]),
    )
    latent = Latent(
        config.get("q_lora_rank", 0, LATENT["query_rank"]),
        config.need("kv_lora_rank", LATENT["kv_rank"]),
        plain,
        rotary,
        config.need("v_head_dim", LATENT["value_dim"]),
    )
    values = config.values | {"head_dim": plain + rotary}  # which DeepSeek's configs do not have, and hidden / heads is not
    shape = _llama(_Config(values, config.name), experts=experts)
    return replace(shape, kv_heads=shape.heads, latent=latent)


def _gpt_neox(config: _Config) -> Shape:
    return replace(_llama(config), gated=False, biases=True)


def _gpt2(config: _Config) -> Shape:
    hidden = config.need("n_embd", SHAPE["hidden"])
    values = {
        "hidden_size": hidden,
        "num_hidden_layers": config.need("n_layer", SHAPE["layers"]),
        "num_attention_heads": config.need("n_head", SHAPE["heads"]),
        "intermediate_size": config.get("n_inner", 4 * hidden, SHAPE["ffn"]),
        "vocab_size": config.need("vocab_size", SHAPE["vocab"]),
        "max_position_embeddings": config.need("n_positions", SHAPE["context"]),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
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
