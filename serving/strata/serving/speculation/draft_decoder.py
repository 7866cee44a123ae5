"""Draft model of an engine on a CPU: a dense decoder in NumPy, with a KV cache of its own.

Drafting pays if a drafted token takes much less time than a step of the target. In a small model most of the time is not
arithmetic: an operator takes torch 10 us to start, and vLLM 2 ms of Python around the operators of a token (attention metadata,
slots, batch padding). NumPy starts an operator in 1 us and computes the same products, in fp32. The cache is never transferred:
the drafter computes it from the tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from strata.platform.model_families import registry
from strata.platform.recipe import ModelSection

Array = NDArray[np.float32]
Whole = NDArray[np.int64]

LATER = np.float32(-1e30)  # score of a token that a place does not attend to


@dataclass(frozen=True)
class Layer:
    """Matrices are transposed: [inputs, outputs]."""

    attention_norm: Array
    qkv: Array
    qkv_bias: Array | None
    query_norm: Array | None
    key_norm: Array | None
    output: Array
    output_bias: Array | None
    ffn_norm: Array
    gate_up: Array
    down: Array


class DraftDecoder:
    """Computes tokens of `rows` sequences of up to `capacity` tokens."""

    def __init__(self, folder: Path, section: ModelSection, rows: int, capacity: int) -> None:
        self._heads, self._kv_heads, self._dim, self._ffn = section.heads, section.kv_heads, section.head_dim, section.ffn
        self._eps, self._scale = section.norm_eps, section.head_dim**-0.5
        weights = _weights(folder, section)
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = (self._embedding if section.tie_embeddings else weights["lm_head.weight"]).T
        self._norm = weights["model.norm.weight"]
        self._layers = [_layer(weights, f"model.layers.{layer}.") for layer in range(section.layers)]
        cos, sin = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))(torch.empty(0), torch.arange(capacity)[None])
        self._cos, self._sin = cos[0].numpy(), sin[0].numpy()
        self._sin[:, : self._dim // 2] *= -1
        shape = section.layers, rows, self._kv_heads, capacity, self._dim
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._range = np.arange(max(rows, capacity))

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copies the caches of rows to others; a row may be both."""
        self._keys[:, targets] = self._keys[:, sources]
        self._values[:, targets] = self._values[:, sources]

    def next_tokens(self, rows: slice, tokens: Whole, starts: Whole, counts: Whole) -> Whole:
        """The likeliest token after `counts` tokens of each row. `tokens` [rows, longest] follow the `starts` tokens in a row's
        cache; what is behind a row's count is computed for nothing, and overwritten by its next tokens."""
        number, longest = tokens.shape
        places = starts[:, None] + self._range[:longest]
        cos, sin = self._cos[places][:, :, None], self._sin[places][:, :, None]
        end = int(places[:, -1].max()) + 1
        later = ((self._range[:end] > places[:, :, None]) * LATER)[:, None, None]
        row = self._range[rows, None]
        x: Array = self._embedding[tokens.reshape(-1)]  # of all rows: one product instead of one for each row
        for keys, values, layer in zip(self._keys, self._values, self._layers, strict=True):
            qkv = _linear(self._normed(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
            qkv = qkv.reshape(number, longest, -1, self._dim)
            query, key = qkv[:, :, : self._heads], qkv[:, :, self._heads : -self._kv_heads]
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)
            query = self._rotated(query, cos, sin).transpose(0, 2, 1, 3)
            keys[row, :, places] = self._rotated(key, cos, sin)
            values[row, :, places] = qkv[:, :, -self._kv_heads :]
            grouped = query.reshape(number, self._kv_heads, -1, self._dim)  # query heads that share keys
            scores = grouped @ keys[rows, :, :end].swapaxes(-1, -2) * self._scale
            by_head = scores.reshape(number, self._kv_heads, -1, longest, end) + later
            attended = _softmax(by_head).reshape(scores.shape) @ values[rows, :, :end]
            joined = attended.reshape(number, self._heads, longest, self._dim).swapaxes(1, 2).reshape(number * longest, -1)
            x = x + _linear(joined, layer.output, layer.output_bias)
            gate_up = self._normed(x, layer.ffn_norm) @ layer.gate_up
            gate, up = gate_up[:, : self._ffn], gate_up[:, self._ffn :]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down
        last = x[self._range[:number] * longest + counts - 1]
        likeliest: Whole = (self._normed(last, self._norm) @ self._head).argmax(-1)
        return likeliest

    def _normed(self, x: Array, weight: Array) -> Array:
        mean: Array = np.vecdot(x, x) / x.shape[-1]
        normed: Array = x / np.sqrt(mean + self._eps)[..., None] * weight
        return normed

    def _rotated(self, x: Array, cos: Array, sin: Array) -> Array:
        half = self._dim // 2
        swapped: Array = np.concatenate([x[..., half:], x[..., :half]], -1)
        rotated: Array = x * cos + swapped * sin
        return rotated


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    return x @ weight if bias is None else x @ weight + bias


def _softmax(scores: Array) -> Array:
    weights: Array = np.exp(scores - scores.max(-1, keepdims=True))
    shares: Array = weights / weights.sum(-1, keepdims=True)
    return shares


def _layer(weights: dict[str, Array], prefix: str) -> Layer:
    def joined(*names: str) -> Array | None:
        found = [weights[prefix + name] for name in names if prefix + name in weights]
        return np.ascontiguousarray(np.concatenate(found).T) if found else None

    def given(*names: str) -> Array:
        found = joined(*names)
        assert found is not None
        return found

    parts = [f"self_attn.{part}_proj" for part in "qkv"]
    return Layer(
        attention_norm=given("input_layernorm.weight"),
        qkv=given(*(f"{part}.weight" for part in parts)),
        qkv_bias=joined(*(f"{part}.bias" for part in parts)),
        query_norm=joined("self_attn.q_norm.weight"),
        key_norm=joined("self_attn.k_norm.weight"),
        output=given("self_attn.o_proj.weight"),
        output_bias=joined("self_attn.o_proj.bias"),
        ffn_norm=given("post_attention_layernorm.weight"),
        gate_up=given("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=given("mlp.down_proj.weight"),
    )


def _weights(folder: Path, section: ModelSection) -> dict[str, Array]:
    assert section.family is not None
    names = {location.tensor: name for name, location in registry.named(section.family).tensors(section).items()}
    found: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {names[name]: tensors.get_tensor(name).float().numpy() for name in names.keys() & tensors.keys()}
    if missing := sorted(set(names.values()) - set(found)):
        raise ValueError(f"the weights in {folder} lack {missing[0]}")
    return found
