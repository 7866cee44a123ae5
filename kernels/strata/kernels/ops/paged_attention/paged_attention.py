"""Attention over a paged KV cache, addressed through block tables as in serving.

A batch may mix decoding sequences, one query each, with prompts and prompt chunks. Sequences with few queries are bound by
reading the cache (decode.py), the others by the tensor cores (prefill.py). Nothing is read back from the GPU, and grids depend
only on shapes and the `max_` arguments, so a CUDA graph can replay a call for other lengths.

A cache in fp8 (e4m3) halves what is read. Its keys and values are multiplied by one scale each, as in vLLM.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.ops.fp8_cache import FP8, check_scales, widened
from strata.kernels.ops.on_device import on_tensor_device
from strata.kernels.ops.paged_attention.decode import LEAST_ROWS, MOST_ROWS, decode_triton, decode_tunable, rows_for
from strata.kernels.ops.paged_attention.prefill import prefill_triton, prefill_tunable
from strata.kernels.tuning.tunable import Config, TuningCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_HEAD_DIM = 256
MOST_GROUP = 64


def reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    max_query_len: int = 0,
    max_context_len: int = 0,
    scale: float | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Computes one query at a time. A query that attends to no key has output zero."""
    out = torch.zeros_like(q)
    key_cache, value_cache = widened(key_cache, k_scale, q.dtype), widened(value_cache, v_scale, q.dtype)
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = key_cache.shape[1:3]
    starts = query_starts.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        for token in range(starts[seq], starts[seq + 1]):
            last = context - starts[seq + 1] + token
            if last < 0:
                continue
            keys = torch.arange(max(last + 1 - window, 0) if window else 0, last + 1, device=q.device)
            blocks = block_tables[seq, keys // block_size].long()
            k, v = (cache[blocks, keys % block_size] for cache in (key_cache, value_cache))  # [keys, kv_heads, head_dim]
            q_groups = q[token].view(kv_heads, heads // kv_heads, head_dim)
            scores = torch.einsum("hgd,khd->hgk", q_groups, k) * (head_dim**-0.5 if scale is None else scale)
            out[token] = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v).reshape(heads, head_dim)
    return out


def paged_attention_triton(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    out: Tensor,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    window: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    arrivals: Tensor | None = None,
    usual_query_len: int | None = None,
) -> None:
    """`usual_query_len`: where max_query_len is only a bound, as in a CUDA graph for any batch, the queries of most sequences.
    Tiles of the bound's size would take their time in every sequence."""
    tokens, seqs, group = q.shape[0], context_lens.shape[0], q.shape[1] // key_cache.shape[2]
    if tokens == 0 or seqs == 0:
        return
    inputs = (q, key_cache, value_cache, block_tables, context_lens, query_starts, out)
    few = max(LEAST_ROWS // group, 1)
    if usual_query_len is not None and few < usual_query_len <= MOST_ROWS // group:
        few = rows_for(usual_query_len, group) // group
    decoded = max_query_len * group <= max(MOST_ROWS, group)
    if decoded and (usual_query_len is None or max_query_len <= few):
        decode_triton(*inputs, max_query_len, max_context_len, scale, window, k_scale, v_scale, arrivals)
    elif not decoded and tokens >= seqs * max_query_len:  # all sequences are prompts of one length
        prefill_triton(*inputs, 1, scale, window, k_scale, v_scale)
    else:
        decode_triton(*inputs, few, max_context_len, scale, window, k_scale, v_scale, arrivals)
        scales = (k_scale, v_scale)
        if decoded:
            decode_triton(*inputs, max_query_len, max_context_len, scale, window, *scales, arrivals, few + 1)
        else:
            prefill_triton(*inputs, few + 1, scale, window, *scales, follows=True)


def tuning_cases(device: torch.device) -> list[TuningCase]:
    dtypes = (torch.bfloat16, FP8)
    decodes = [
        _decode_case(32, 8, head_dim, queries, dtype, device)
        for head_dim in (64, 128, 256)
        for queries in (1, 8, 16)
        for dtype in dtypes
    ]
    prefills = [_prefill_case(32, kv_heads, head_dim, device) for head_dim in (64, 128, 256) for kv_heads in (4, 8, 32)]
    return decodes + prefills


def _decode_case(heads: int, kv_heads: int, head_dim: int, queries: int, dtype: torch.dtype, device: torch.device) -> TuningCase:
    q, key_cache, value_cache, tables, lengths, starts, out = _tuning_inputs(32, 8192, queries, heads, kv_heads, head_dim, device)
    inputs = (q, key_cache.to(dtype), value_cache.to(dtype), tables, lengths, starts, out)
    scale = torch.ones((), device=device) if dtype == FP8 else None

    def run(chosen: Config) -> None:
        decode_triton(*inputs, queries, 8192, head_dim**-0.5, 0, scale, scale, chosen=chosen.arguments())

    return TuningCase(decode_tunable, (head_dim, max(rows_for(queries, heads // kv_heads), LEAST_ROWS), dtype.itemsize), run)


def _prefill_case(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> TuningCase:
    inputs = _tuning_inputs(4, 4096, 2048, heads, kv_heads, head_dim, device)

    def run(chosen: Config) -> None:
        prefill_triton(*inputs, 1, head_dim**-0.5, 0, chosen=chosen.arguments())

    return TuningCase(prefill_tunable, (head_dim, heads // kv_heads, False), run)


def _tuning_inputs(
    seqs: int, context: int, queries: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs with blocks of 16, scattered over the cache."""
    blocks = seqs * context // 16
    key_cache, value_cache = (torch.randn(blocks, 16, kv_heads, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    block_tables = torch.randperm(blocks, device=device).int().view(seqs, -1)
    context_lens = torch.full((seqs,), context, device=device, dtype=torch.int32)
    query_starts = torch.arange(seqs + 1, device=device, dtype=torch.int32) * queries
    q = torch.randn(seqs * queries, heads, head_dim, device=device, dtype=torch.bfloat16)
    return q, key_cache, value_cache, block_tables, context_lens, query_starts, torch.empty_like(q)


def paged_attention_cpu(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    out: Tensor,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    window: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    block_size = key_cache.shape[1]
    starts = query_starts.tolist()
    for seq, context in enumerate(context_lens.tolist()):
        begin, end = starts[seq], starts[seq + 1]
        seeing = max(begin, end - context)  # earlier queries are before every key
        out[begin:seeing] = 0
        if seeing == end:
            continue
        blocks = block_tables[seq, : -(-context // block_size)].long()
        k, v = (
            widened(cache[blocks], cache_scale, q.dtype).flatten(0, 1)[:context].transpose(0, 1)
            for cache, cache_scale in ((key_cache, k_scale), (value_cache, v_scale))
        )
        keys = torch.arange(context)
        positions = torch.arange(context - (end - seeing), context)[:, None]
        seen = keys <= positions
        if window:
            seen &= keys > positions - window
        attended = F.scaled_dot_product_attention(q[seeing:end].transpose(0, 1), k, v, seen, scale=scale, enable_gqa=True)
        out[seeing:end] = attended.transpose(0, 1)


library = torch.library.Library("strata", "FRAGMENT")
library.define(
    "paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor context_lens, "
    "Tensor query_starts, Tensor(a!) out, int max_query_len, int max_context_len, float scale, int window, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()"
)
library.impl("paged_attention", paged_attention_cpu, "CPU")
library.impl("paged_attention", on_tensor_device(paged_attention_triton), "CUDA")


@torch.library.register_fake("strata::paged_attention", lib=library)
def _(*arguments: object) -> None:
    return None


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    max_query_len: int,
    max_context_len: int,
    scale: float | None = None,
    window: int | None = None,
    out: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention of q [tokens, heads, head_dim], the concatenated queries of all sequences, over a paged cache.

    - query_starts [seqs + 1]: first query of each sequence, and the end of the last.
    - context_lens [seqs]: number of keys of a sequence. Its queries are at the last of these keys.
    - key_cache, value_cache [blocks, block_size, kv_heads, head_dim]: only the last dimension must be contiguous.
    - block_tables [seqs, blocks]: key i is in slot i % block_size of block block_tables[seq, i // block_size].

    - k_scale, v_scale: for caches in float8_e4m3fn, fp32 tensors of one element that keys and values are multiplied by.

    A query attends to the `window` keys up to its own, or to all. Rows of `out` outside query_starts are not written.
    """
    _check(q, key_cache, value_cache, block_tables, context_lens, query_starts, window, out, k_scale, v_scale)
    if out is None:
        out = torch.empty_like(q)
    torch.ops.strata.paged_attention(
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        query_starts,
        out,
        max_query_len,
        max_context_len,
        q.shape[-1] ** -0.5 if scale is None else scale,
        window or 0,
        k_scale,
        v_scale,
    )
    return out


def _check(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    window: int | None,
    out: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    if q.ndim != 3 or key_cache.ndim != 4 or value_cache.shape != key_cache.shape or key_cache.shape[3] != q.shape[2]:
        raise ValueError(
            "paged_attention expects q [tokens, heads, head_dim] and caches [blocks, block_size, kv_heads, head_dim], got "
            f"q {list(q.shape)} with caches {list(key_cache.shape)} and {list(value_cache.shape)}."
        )
    heads, kv_heads, head_dim = q.shape[1], key_cache.shape[2], q.shape[2]
    if heads % kv_heads or heads // kv_heads > MOST_GROUP:
        raise ValueError(
            f"paged_attention supports 1 to {MOST_GROUP} query heads per KV head, got {heads} heads and {kv_heads} KV heads."
        )
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"paged_attention supports head dims up to {MOST_HEAD_DIM}, got {head_dim}.")
    if (
        q.dtype not in DTYPES
        or key_cache.dtype not in (q.dtype, FP8)
        or value_cache.dtype != key_cache.dtype
        or (q.is_cuda and q.dtype == torch.float32)
    ):
        raise ValueError(
            "paged_attention supports bfloat16 and float16, and float32 on a CPU, with one dtype for queries and caches, or "
            f"caches in float8_e4m3fn, got {q.dtype} with {key_cache.dtype} and {value_cache.dtype} on {q.device.type}."
        )
    check_scales("paged_attention", key_cache, k_scale, v_scale)
    if q.stride(2) != 1 or key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError("paged_attention expects contiguous heads (stride 1 in the last dimension) in queries and caches.")
    seqs = context_lens.shape[0]
    if block_tables.ndim != 2 or block_tables.shape[0] != seqs or query_starts.shape != (seqs + 1,):
        raise ValueError(
            "paged_attention expects context_lens [seqs], block_tables [seqs, blocks] and query_starts [seqs + 1], got "
            f"{list(context_lens.shape)}, {list(block_tables.shape)} and {list(query_starts.shape)}."
        )
    if block_tables.dtype != torch.int32 or context_lens.dtype != torch.int32 or query_starts.dtype != torch.int32:
        raise ValueError(
            "paged_attention expects block_tables, context_lens and query_starts in int32, got "
            f"{block_tables.dtype}, {context_lens.dtype} and {query_starts.dtype}."
        )
    if block_tables.stride(1) != 1 or context_lens.stride(0) != 1 or query_starts.stride(0) != 1:
        raise ValueError("paged_attention expects contiguous rows of block_tables, context_lens and query_starts.")
    if window is not None and window < 1:
        raise ValueError(f"paged_attention expects a window of at least 1, the query's own key, got {window}.")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1):
        raise ValueError(
            f"paged_attention expects an `out` of q's shape {list(q.shape)} and dtype {q.dtype} with contiguous heads, "
            f"got {list(out.shape)} in {out.dtype} with strides {out.stride()}."
        )
    if torch.is_grad_enabled() and (q.requires_grad or key_cache.requires_grad or value_cache.requires_grad):
        raise ValueError(
            "paged_attention has no gradient, and an input requires one: "
            "call it under torch.no_grad(), or train with flash_attention."
        )
