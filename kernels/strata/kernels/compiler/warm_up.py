"""Compiles every kernel variant a server can launch before the first request: a first launch compiles, which takes seconds.

Triton recompiles a kernel if an integer argument becomes 1 or changes between multiples of 16 and others, and if a tunable
selects another configuration, which depends on sizes rounded to powers of two. Two sizes per power of two, one divisible by 16
and one not, plus size 1, therefore cover every batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from strata.kernels.compiler.ahead import compile_ahead


@dataclass(frozen=True)
class ServedModel:
    """Properties of a model and its cache that serving operations depend on; `max_tokens` and `max_seqs` are per step."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    dtype: torch.dtype
    block_size: int
    max_tokens: int
    max_seqs: int
    max_context: int
    eps: float = 1e-6


def warm_up(model: ServedModel, device: torch.device) -> int:
    """Compiles on all host cores, or loads from Triton's disk cache, and launches nothing. Returns the number of kernels that
    were not loaded before."""
    with torch.no_grad():
        return compile_ahead([*_layers(model, device), *_attention(model, device)])


def sizes(largest: int) -> list[int]:
    """1, and for each power of two up to the next above `largest`, a size divisible by 16 and one that is not."""
    powers = [2**power for power in range(1, max(largest - 1, 0).bit_length() + 1)]
    return sorted({1, largest, *(size for power in powers for size in (power, power - 1) if size <= largest)})


def _layers(model: ServedModel, device: torch.device) -> Iterator[Callable[[], Any]]:
    from strata.kernels.ops.kv_cache_write import kv_cache_write
    from strata.kernels.ops.rms_norm.rms_norm import add_rms_norm, rms_norm
    from strata.kernels.ops.rope import rope_
    from strata.kernels.ops.swiglu import swiglu

    empty = partial(torch.empty, dtype=model.dtype, device=device)
    weight, head_weight = empty(model.hidden), empty(model.head_dim)
    key_cache, value_cache = (empty(2, model.block_size, model.kv_heads, model.head_dim) for _ in range(2))
    cos, sin = (empty(model.max_context, model.head_dim // 2, dtype=torch.float32) for _ in range(2))
    all_x, all_packed = (empty(model.max_tokens, width) for width in (model.hidden, 2 * model.ffn))
    all_q, all_k = (empty(model.max_tokens, heads, model.head_dim) for heads in (model.heads, model.kv_heads))
    all_places = empty(model.max_tokens, dtype=torch.int64)
    for tokens in sizes(model.max_tokens):
        x, packed, q, k, places = (one[:tokens] for one in (all_x, all_packed, all_q, all_k, all_places))
        yield partial(rms_norm, x, weight, model.eps)
        yield partial(add_rms_norm, x, x, weight, model.eps)
        yield partial(rms_norm, q, head_weight, model.eps)  # for models with query and key norms
        yield partial(swiglu, packed[:, : model.ffn], packed[:, model.ffn :])
        yield partial(rope_, q, k, cos, sin, positions=places)
        yield partial(kv_cache_write, k, k, key_cache, value_cache, places)


def _attention(model: ServedModel, device: torch.device) -> Iterator[Callable[[], Any]]:
    """Batches of one query per sequence, and batches in which one sequence has more, over contexts of every size."""
    from strata.kernels.ops.paged_attention.paged_attention import paged_attention

    all_q = torch.empty(model.max_tokens, model.heads, model.head_dim, dtype=model.dtype, device=device)
    cache = torch.empty(2, model.block_size, model.kv_heads, model.head_dim, dtype=model.dtype, device=device)
    blocks = -(-model.max_context // model.block_size)
    for seqs in sizes(model.max_seqs):
        tables, lengths, starts = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in ((seqs, blocks), seqs, seqs + 1)
        )
        for longest in sizes(min(model.max_tokens - seqs + 1, model.max_context)):
            batch = (all_q[: seqs - 1 + longest], cache, cache, tables, lengths, starts)
            for context in sizes(model.max_context):
                if context >= longest:
                    yield partial(paged_attention, *batch, max_query_len=longest, max_context_len=context)
