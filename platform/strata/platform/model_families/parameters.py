"""Names and shapes of all parameters of Strata's model, without building it."""

from collections.abc import Iterator

from strata.platform.recipe import ModelSection

NORMS = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}

Named = Iterator[tuple[str, tuple[int, ...]]]


def shapes(section: ModelSection) -> dict[str, tuple[int, ...]]:
    """Shapes by name. A tied output layer is the embedding and has no entry of its own."""
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (section.vocab, section.hidden)}
    for layer in range(section.layers):
        named |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(section, layer)}
    named["model.norm.weight"] = (section.hidden,)
    if not section.tie_embeddings:
        named["lm_head.weight"] = (section.vocab, section.hidden)
    return named


def _layer(section: ModelSection, layer: int) -> Named:
    for norm in NORMS[section.architecture.norms]:
        yield f"{norm}.weight", (section.hidden,)
    yield from _attention(section)
    moe = section.moe
    if moe is None or layer in moe.dense_layers:
        yield from _feed_forward("mlp", section.hidden, moe.dense_ffn if moe else section.ffn, bias=False)
        return
    yield from _linear("mlp.gate", section.hidden, moe.experts, moe.bias)
    for expert in range(moe.experts):
        yield from _feed_forward(f"mlp.experts.{expert}", section.hidden, section.ffn, moe.bias)
    if moe.shared_ffn:
        yield from _feed_forward("mlp.shared_expert", section.hidden, moe.shared_ffn, bias=False)
        yield from _linear("mlp.shared_expert_gate", section.hidden, 1, bias=False)


def _attention(section: ModelSection) -> Named:
    architecture = section.architecture
    heads = {"q": section.heads, "k": section.kv_heads, "v": section.kv_heads}
    for kind, count in heads.items():
        yield from _linear(f"self_attn.{kind}_proj", section.hidden, count * section.head_dim, architecture.qkv_bias)
    yield from _linear("self_attn.o_proj", section.heads * section.head_dim, section.hidden, architecture.output_bias)
    if architecture.qk_norm != "none":
        for kind in ("q", "k"):
            normed = heads[kind] if architecture.qk_norm == "width" else 1
            yield f"self_attn.{kind}_norm.weight", (normed * section.head_dim,)
    if architecture.sinks:
        yield "self_attn.sinks", (section.heads,)


def _feed_forward(name: str, hidden: int, ffn: int, bias: bool) -> Named:
    yield from _linear(f"{name}.gate_proj", hidden, ffn, bias)
    yield from _linear(f"{name}.up_proj", hidden, ffn, bias)
    yield from _linear(f"{name}.down_proj", ffn, hidden, bias)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)
