"""Paged attention: decode against memory bandwidth and vLLM's kernels, prompts and mixed batches against vLLM's."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.ops.fp8_cache import narrowed, widened
from strata.kernels.ops.paged_attention.paged_attention import paged_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
FP8_BARS = (Bar(1.7, "Strata bf16"),)
DECODE_BARS = (Bar(0.8, "copy"), Bar(1.0, "vLLM FA3"), Bar(1.2, "vLLM Triton"))


@dataclass(frozen=True)
class Lengths:
    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    block_size: int = 16

    def one_length(self) -> bool:
        return len(set(self.contexts)) == 1 and len(set(self.queries)) == 1

    def pairs(self) -> int:
        """Pairs of a query and a key it attends to."""
        return sum(
            queries * (context - queries) + queries * (queries + 1) // 2
            for context, queries in zip(self.contexts, self.queries, strict=True)
        )


@dataclass(frozen=True)
class Batch:
    """Keys and values of a head are adjacent and blocks are scattered over the cache, as in vLLM."""

    lengths: Lengths
    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor

    @property
    def max_query_len(self) -> int:
        return max(self.lengths.queries)

    @property
    def max_context_len(self) -> int:
        return max(self.lengths.contexts)


def cases() -> list[Case]:
    decodes = [_decode(f"decode batch 32, {k}k", 32, k * 1024, 16, DECODE_BARS) for k in (4, 8, 16, 32)]
    neighbours = [
        _decode("decode batch 1, 32k", 1, 32768, 16),
        _decode("decode batch 256, 1k", 256, 1024, 16),
        _decode("decode batch 32, 8k, blocks of 128", 32, 8192, 128),
    ]
    far_apart = Lengths(tuple(64 + 2 * i * i for i in range(128)), (1,) * 128)
    prompts = Lengths((4096,) * 4, (4096,) * 4)
    chunks = Lengths((16384,) * 2, (1024,) * 2)
    mixed = Lengths((4096,) * 32 + (2048, 8192), (1,) * 32 + (2048, 512))
    return [
        *decodes,
        *(_decode_fp8(f"decode batch 32, {k}k, fp8 cache", k * 1024, bars) for k, bars in ((4, ()), (16, FP8_BARS))),
        *neighbours,
        Case("paged_attention", "decode batch 128, 64 to 32k", partial(_build, far_apart)),
        Case("paged_attention", "prompts 4 x 4k", partial(_build, prompts)),
        Case("paged_attention", "chunks 2 x 1k after 15k", partial(_build, chunks)),
        Case("paged_attention", "32 decodes at 4k, 2 prompts", partial(_build, mixed)),
    ]


def _decode(name: str, batch: int, context: int, block_size: int, bars: tuple[Bar, ...] = ()) -> Case:
    return Case("paged_attention", name, partial(_build, Lengths((context,) * batch, (1,) * batch, block_size)), bars)


def _decode_fp8(name: str, context: int, bars: tuple[Bar, ...]) -> Case:
    return Case("paged_attention", name, partial(_build_fp8, Lengths((context,) * 32, (1,) * 32)), bars)


def _build(lengths: Lengths, device: torch.device) -> Contest:
    batch = _inputs(lengths, device)
    compiled = torch.compile(_gathered)
    uneven = Missing("torch has no paged attention; gathering the blocks needs sequences of one length")
    contenders: dict[str, Callable[[], Any] | Missing] = {
        OURS: partial(_ours, batch),
        "torch eager": partial(_gathered, batch) if lengths.one_length() else uneven,
        "torch.compile": partial(compiled, batch) if lengths.one_length() else uneven,
        "vLLM FA3": _vllm_fa3(batch),
        "vLLM Triton": _vllm_triton(batch),
    }
    cache_bytes = 2 * sum(lengths.contexts) * KV_HEADS * HEAD_DIM * batch.q.element_size()
    return Contest(
        contenders,
        reference=partial(_exact, batch),
        tolerance=1e-2,
        bytes=cache_bytes + 2 * batch.q.nbytes,
        flops=4 * lengths.pairs() * HEADS * HEAD_DIM,
    )


def _build_fp8(lengths: Lengths, device: torch.device) -> Contest:
    """The same keys and values in fp8 and, widened, in bf16."""
    wide = _inputs(lengths, device)
    scale = torch.full((), 0.01, device=device)
    stored = torch.cat([narrowed(wide.key_cache, scale), narrowed(wide.value_cache, scale)], -1)
    fp8 = replace(wide, key_cache=stored[..., :HEAD_DIM], value_cache=stored[..., HEAD_DIM:])
    cache = torch.cat([widened(one, scale, torch.bfloat16) for one in (fp8.key_cache, fp8.value_cache)], -1)
    wide = replace(wide, key_cache=cache[..., :HEAD_DIM], value_cache=cache[..., HEAD_DIM:])
    return Contest(
        {OURS: partial(_ours, fp8, scale), "Strata bf16": partial(_ours, wide)},
        reference=partial(_exact, wide),
        tolerance=1e-2,
        bytes=2 * sum(lengths.contexts) * KV_HEADS * HEAD_DIM + 2 * wide.q.nbytes,
        flops=4 * lengths.pairs() * HEADS * HEAD_DIM,
    )


def _inputs(lengths: Lengths, device: torch.device) -> Batch:
    size = lengths.block_size
    needed = [-(-context // size) for context in lengths.contexts]
    cache = torch.empty(sum(needed), size, KV_HEADS, 2 * HEAD_DIM, device=device, dtype=torch.bfloat16).normal_()
    key_cache, value_cache = cache[..., :HEAD_DIM], cache[..., HEAD_DIM:]
    block_tables = torch.zeros(len(needed), max(needed), device=device, dtype=torch.int32)
    order = torch.randperm(sum(needed), device=device).int()
    for own, blocks in zip(block_tables, torch.split(order, needed), strict=True):
        own[: len(blocks)] = blocks
    return Batch(
        lengths,
        torch.randn(sum(lengths.queries), HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16),
        key_cache,
        value_cache,
        block_tables,
        torch.tensor(lengths.contexts, device=device, dtype=torch.int32),
        torch.tensor([0, *accumulate(lengths.queries)], device=device, dtype=torch.int32),
    )


def _ours(batch: Batch, scale: Tensor | None = None) -> Tensor:
    return paged_attention(
        batch.q,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        max_query_len=batch.max_query_len,
        max_context_len=batch.max_context_len,
        k_scale=scale,
        v_scale=scale,
    )


def _gathered(batch: Batch) -> Tensor:
    """Copies all keys and values out of their blocks first."""
    seqs, queries, context = len(batch.lengths.contexts), batch.max_query_len, batch.max_context_len
    k, v = (
        cache[batch.block_tables].flatten(1, 2)[:, :context].transpose(1, 2) for cache in (batch.key_cache, batch.value_cache)
    )
    q = batch.q.view(seqs, queries, HEADS, HEAD_DIM).transpose(1, 2)
    seen = None if queries == 1 else _seen(queries, context, batch.q.device)
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def _exact(batch: Batch) -> Tensor:
    """Exact result in fp32, one KV head of a sequence at a time: the scores of a whole prompt would not fit in memory."""
    out = torch.empty(batch.q.shape, device=batch.q.device)
    group, size, first = HEADS // KV_HEADS, batch.lengths.block_size, 0
    for seq, (context, queries) in enumerate(zip(batch.lengths.contexts, batch.lengths.queries, strict=True)):
        blocks = batch.block_tables[seq, : -(-context // size)]
        own = slice(first, first + queries)
        for head in range(KV_HEADS):
            k, v = (cache[blocks, :, head].flatten(0, 1)[:context].float() for cache in (batch.key_cache, batch.value_cache))
            heads = slice(head * group, (head + 1) * group)
            q = batch.q[own, heads].float().transpose(0, 1)
            scores = (q @ k.T * HEAD_DIM**-0.5).masked_fill_(~_seen(queries, context, q.device), -torch.inf)
            out[own, heads] = (scores.softmax(-1) @ v).transpose(0, 1)
        first += queries
    return out


def _seen(queries: int, context: int, device: torch.device) -> Tensor:
    positions = torch.arange(context - queries, context, device=device)
    return torch.arange(context, device=device) <= positions[:, None]


def _vllm_fa3(batch: Batch) -> Callable[[], Tensor] | Missing:
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata, is_fa_version_supported
    except ImportError as error:
        return Missing(str(error))
    if batch.q.device.type != "cuda" or not is_fa_version_supported(3):
        return Missing("FA3 needs Hopper")
    out = torch.empty_like(batch.q)
    schedule = get_scheduler_metadata(  # vLLM computes this once per step for all layers, so it is not timed
        batch_size=len(batch.lengths.contexts),
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_context_len,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=HEAD_DIM,
        cache_seqlens=batch.context_lens,
        qkv_dtype=batch.q.dtype,
        cu_seqlens_q=batch.query_starts,
        page_size=batch.lengths.block_size,
        causal=True,
    )

    def run() -> Tensor:
        flash_attn_varlen_func(
            q=batch.q,
            k=batch.key_cache,
            v=batch.value_cache,
            out=out,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=batch.max_query_len,
            seqused_k=batch.context_lens,
            max_seqlen_k=batch.max_context_len,
            causal=True,
            block_table=batch.block_tables,
            scheduler_metadata=schedule,
            fa_version=3,
        )
        return out

    return run


def _vllm_triton(batch: Batch) -> Callable[[], Tensor] | Missing:
    """Uses the settings and buffers of vLLM's backend."""
    try:
        from vllm.v1.attention.backends.triton_attn import MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as error:
        return Missing(str(error))
    out = torch.empty_like(batch.q)
    most = MIN_LAUNCH_GRID_SIZE_2D // KV_HEADS
    parts = torch.empty(most, HEADS, NUM_PAR_SOFTMAX_SEGMENTS, HEAD_DIM, device=batch.q.device)
    maxima, sums = parts.new_empty(parts.shape[:3]), parts.new_empty(parts.shape[:3])

    def run() -> Tensor:
        unified_attention(
            q=batch.q,
            k=batch.key_cache,
            v=batch.value_cache,
            out=out,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=batch.max_query_len,
            seqused_k=batch.context_lens,
            max_seqlen_k=batch.max_context_len,
            softmax_scale=HEAD_DIM**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.block_tables,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=most,
            num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS,
            softmax_segm_output=parts,
            softmax_segm_max=maxima,
            softmax_segm_expsum=sums,
        )
        return out

    return run
