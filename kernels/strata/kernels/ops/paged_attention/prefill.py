"""Paged attention for sequences with many queries: prompts, and prompt chunks that follow cached tokens.

A tile holds all query heads that share a KV head, for as many tokens as fit, so that keys and values are read once per group. The
grid is large enough for every distribution of queries over sequences, which the host does not know; surplus programs return.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from strata.kernels.ops.arrivals import multiprocessors
from strata.kernels.ops.paged_attention.decode import LOG2_E, half_queries, padded_seqs
from strata.kernels.tuning.tunable import Config, Key, Tunable, architecture, bucket, config


@triton.jit
def attend(
    q_tile,
    best,
    weight,
    acc,
    blocks,
    first,
    last,
    table,
    k_base,
    v_base,
    context,
    position,
    k_block,
    k_slot,
    v_block,
    v_slot,
    row_scale,
    FP8: tl.constexpr,
    MASKED: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Processes key tiles [first, last). `blocks` holds the block numbers of the next tile, loaded one tile ahead."""
    in_tile = tl.arange(0, BLOCK_N)
    for tile in range(first, last):
        keys = tile * BLOCK_N + in_tile
        block, slot = blocks.to(tl.int64), keys % BLOCK_SIZE
        blocks = tl.load(table + (keys + BLOCK_N) // BLOCK_SIZE, mask=keys + BLOCK_N < context, other=0)
        k_tile = k_base + (block * k_block + slot * k_slot)[:, None]
        v_tile = v_base + (block * v_block + slot * v_slot)[:, None]
        if MASKED or HEAD_DIM < DIMS:
            there = (keys < context)[:, None]  # slots beyond the context may hold NaN
            if HEAD_DIM < DIMS:
                there &= (tl.arange(0, DIMS) < HEAD_DIM)[None, :]
            k = tl.load(k_tile, mask=there, other=0.0)
            v = tl.load(v_tile, mask=there, other=0.0)
        else:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        if FP8:
            k = k.to(tl.float16)
            v = v.to(tl.float16)
        scores = tl.dot(q_tile, k.T, input_precision="ieee")
        if FP8:
            scores *= row_scale[:, None]
        if MASKED:
            seen = keys[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= keys[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1) * SCALE)
        p = tl.exp2(scores * SCALE - better[:, None])
        fade = tl.exp2(best - better)
        weight = weight * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        best = better
    return best, weight, acc, blocks


@triton.jit(do_not_specialize=["seqs", "table_seq", "least_queries", "follows"])
def prefill_kernel(
    out,
    q,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    query_starts,
    k_scale,
    v_scale,
    seqs,
    least_queries,
    follows,
    out_token,
    out_head,
    q_token,
    q_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    table_seq,
    SCALE: tl.constexpr,  # with log2(e), for exp2
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPPED: tl.constexpr,  # with the kernel before it
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    FP8: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    if OVERLAPPED and follows == 0:
        gdc_wait()
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the last tokens of a prompt attend to the most keys: start them first
    seq_index = tl.arange(0, SEQS)
    starts = tl.load(query_starts + seq_index, mask=seq_index < seqs, other=2**30)
    seq = tl.sum((starts // TOKENS + seq_index <= tile).to(tl.int32), 0) - 1  # each sequence has one spare tile
    q_start = tl.load(query_starts + seq)
    queries = tl.load(query_starts + seq + 1) - q_start
    first_token = (tile - q_start // TOKENS - seq) * TOKENS
    if (queries < least_queries) | (first_token >= queries):
        if OVERLAPPED:
            gdc_wait()  # kernels behind this one read what the decode launch writes
        return

    context = tl.load(context_lens + seq)
    rows = tl.arange(0, BLOCK_M)
    token, q_heads = first_token + rows // GROUP, head * GROUP + rows % GROUP
    dims = tl.arange(0, DIMS)
    wanted = ((token < queries) & (rows < TOKENS * GROUP))[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (q_start + token).to(tl.int64)[:, None]
    q_tile = tl.load(q + q_rows * q_token + q_heads[:, None] * q_head + dims[None, :], mask=wanted, other=0.0)

    row_scale = rows  # of scores, for fp8 only
    if FP8:
        q_tile, power = half_queries(q_tile)
        row_scale = power * tl.load(k_scale)

    first_position = context - queries + first_token
    position = context - queries + token
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position + 1 - WINDOW, 0) // BLOCK_N
        masked = first
    else:
        masked = tl.maximum(first_position + 1, 0) // BLOCK_N  # every row attends to every key before this tile
    last = tl.cdiv(tl.minimum(first_position + TOKENS, context), BLOCK_N)

    table = block_tables + seq.to(tl.int64) * table_seq
    k_base = key_cache + head.to(tl.int64) * k_head + dims[None, :]
    v_base = value_cache + head.to(tl.int64) * v_head + dims[None, :]
    best = tl.full([BLOCK_M], -1e38, tl.float32)  # finite, to avoid inf - inf in a row that attends to no key
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIMS], tl.float32)
    keys = first * BLOCK_N + tl.arange(0, BLOCK_N)
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < context, other=0)
    if WINDOW == 0:
        best, weight, acc, blocks = attend(
            q_tile,
            best,
            weight,
            acc,
            blocks,
            first,
            masked,
            table,
            k_base,
            v_base,
            context,
            position,
            k_block,
            k_slot,
            v_block,
            v_slot,
            row_scale,
            FP8,
            False,
            SCALE,
            WINDOW,
            HEAD_DIM,
            DIMS,
            BLOCK_SIZE,
            BLOCK_N,
        )
    best, weight, acc, blocks = attend(
        q_tile,
        best,
        weight,
        acc,
        blocks,
        masked,
        last,
        table,
        k_base,
        v_base,
        context,
        position,
        k_block,
        k_slot,
        v_block,
        v_slot,
        row_scale,
        FP8,
        True,
        SCALE,
        WINDOW,
        HEAD_DIM,
        DIMS,
        BLOCK_SIZE,
        BLOCK_N,
    )
    result = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    if FP8:
        result *= tl.load(v_scale)
    target = out + q_rows * out_token + q_heads[:, None] * out_head + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=wanted)
    if OVERLAPPED:
        gdc_wait()


def candidates(arch: int, key: Key) -> list[Config]:
    """With few rows, smaller tiles come first, to occupy more SMs."""
    dims, group, few = map(int, key)
    least = max(bucket(group), 16)
    if arch == 0:
        return [config(BLOCK_M=max(least, 64), BLOCK_N=32)]
    if dims > 128:
        shapes = [(128, 32, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2)]
    else:
        shapes = [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)]
    return [
        config(BLOCK_M=max(rows, least), BLOCK_N=tile, num_warps=warps, num_stages=stages)
        for rows, tile, warps, stages in sorted(shapes, key=lambda shape: few and shape[0])
    ]


prefill_tunable = Tunable("paged_attention_prefill", candidates)


def prefill_triton(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    out: Tensor,
    least_queries: int,
    scale: float,
    window: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    follows: bool = False,
    chosen: dict[str, int] | None = None,
) -> None:
    """Processes sequences with at least `least_queries` queries and leaves other rows unchanged. `follows`: right after
    decode_triton for the other sequences of the batch, and beside it."""
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = key_cache.shape
    seqs, group, dims = context_lens.shape[0], heads // kv_heads, max(bucket(head_dim), 16)
    few = tokens * heads < 128 * multiprocessors(q.device)
    overlapped = architecture(q.device) >= 90
    arguments = chosen or prefill_tunable.arguments((dims, group, few), q.device)
    prefill_kernel[(kv_heads, tokens // (arguments["BLOCK_M"] // group) + seqs)](
        out,
        q,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        query_starts,
        context_lens if k_scale is None else k_scale,
        context_lens if v_scale is None else v_scale,
        seqs,
        least_queries,
        int(follows),
        *out.stride()[:2],
        *q.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        SCALE=scale * LOG2_E,
        WINDOW=window,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIMS=dims,
        BLOCK_SIZE=block_size,
        SEQS=padded_seqs(seqs),
        OVERLAPPED=overlapped,
        launch_pdl=overlapped,
        **arguments,
    )
