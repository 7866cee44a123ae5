"""Gradient of the queries, and delta, the sum of d_out * out over a head, in plain Triton.

See portable_backward.py for the algorithm and for the reason it has two kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.flash_attention.portable import (
    RUNTIME_SIZES,
    Arguments,
    blocks,
    configs,
    document_of,
    key_bounds,
    load_rows,
    seen,
    shared_kib,
    source,
    store_rows,
    strides,
)
from strata.kernels.tuning.tunable import Config, Key, Tunable, config


@triton.jit
def load_lse(pointers, mask):
    """lse in base two; +inf for a query that attends to no key or is out of range, so that exp2(score - lse) is zero."""
    lse = tl.load(pointers, mask=mask, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # log2(e)


@triton.jit
def _add_to_dq(
    dq,
    q,
    d_out,
    lse,
    delta,
    k_source,
    v_source,
    k_strides,
    v_strides,
    place,
    low,
    high,
    positions,
    s,
    window,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    for start in tl.range(low, high, BLOCK_N):
        k = load_rows(k_source, k_strides, place, start, s, MASKED, HEAD_DIM, BLOCK_N, BLOCK_D)
        v = load_rows(v_source, v_strides, place, start, s, MASKED, HEAD_DIM, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        dp = tl.dot(d_out, v.T, input_precision=PRECISION)
        p = tl.exp2(scores * SCALE - lse[:, None])
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            p = tl.where(seen(positions[:, None], keys[None, :], s, window, CAUSAL, WINDOWED), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def dq_kernel(
    d_out_source,
    q_source,
    k_source,
    v_source,
    out_source,
    lse_pointer,
    dq_pointer,
    delta_pointer,
    cu_seqlens,
    d_out_stride_b,
    d_out_stride_t,
    d_out_stride_h,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    out_stride_b,
    out_stride_t,
    out_stride_h,
    t,
    s,
    documents,
    window,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask the last blocks are the longest: start them first
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    batch = tl.program_id(2)
    tokens = t
    kv_tokens = s
    first = 0
    if PACKED:
        block, first, t = document_of(block, cu_seqlens, documents, BLOCK_M)
        s = t
    start = block * BLOCK_M
    if start < t:
        own = (batch, first, head, tokens)
        shared = (batch, first, head // GROUP, kv_tokens)
        k_strides = (k_stride_b, k_stride_t, k_stride_h)
        v_strides = (v_stride_b, v_stride_t, v_stride_h)
        d_out_strides = (d_out_stride_b, d_out_stride_t, d_out_stride_h)
        d_out = load_rows(d_out_source, d_out_strides, own, start, t, True, HEAD_DIM, BLOCK_M, BLOCK_D)
        out = load_rows(out_source, (out_stride_b, out_stride_t, out_stride_h), own, start, t, True, HEAD_DIM, BLOCK_M, BLOCK_D)
        delta = tl.sum(d_out.to(tl.float32) * out.to(tl.float32), 1)
        rows = start + tl.arange(0, BLOCK_M)
        of_rows = (tl.cast(batch, tl.int64) * heads + head) * tokens + first + rows
        tl.store(delta_pointer + of_rows, delta, mask=rows < t)
        lse = load_lse(lse_pointer + of_rows, rows < t)
        q = load_rows(q_source, (q_stride_b, q_stride_t, q_stride_h), own, start, t, True, HEAD_DIM, BLOCK_M, BLOCK_D)
        positions = rows + s - t
        low, full_low, full_high, high = key_bounds(start, t, s, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
        dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        if WINDOWED:
            dq = _add_to_dq(
                dq, q, d_out, lse, delta, k_source, v_source, k_strides, v_strides, shared, low, min(full_low, high), positions,
                s, window, True, CAUSAL, WINDOWED, SCALE, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        dq = _add_to_dq(
            dq, q, d_out, lse, delta, k_source, v_source, k_strides, v_strides, shared, full_low, full_high, positions,
            s, window, False, CAUSAL, WINDOWED, SCALE, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        dq = _add_to_dq(
            dq, q, d_out, lse, delta, k_source, v_source, k_strides, v_strides, shared, max(full_low, full_high), high, positions,
            s, window, True, CAUSAL, WINDOWED, SCALE, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        dq = dq * (SCALE * 0.6931471805599453)  # ln 2 converts the scale back to base e
        store_rows(dq_pointer, dq, own, start, t, heads, HEAD_DIM, BLOCK_M, BLOCK_D)


def _dq_candidates(arch: int, key: Key) -> list[Config]:
    block_d, itemsize, *_ = (int(part) for part in key)
    large = shared_kib(arch) > 200
    if arch == 0:
        return [config(BLOCK_M=32, BLOCK_N=32)]
    if itemsize == 4:
        tiles = [(64, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)]
    elif block_d <= 64:
        tiles = [(128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 2)] if large else [(128, 64, 8, 2), (64, 64, 4, 2)]
    elif block_d == 128:
        tiles = [(64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2)] if large else [(128, 32, 8, 2), (64, 32, 4, 2)]
    else:
        tiles = [(128, 32, 8, 3), (128, 32, 8, 2)] if large else [(64, 32, 8, 2), (32, 32, 4, 1)]
    return configs(arch, tiles, lambda m, n, stages: 2 * (m + n * stages) * block_d * itemsize / 1024)


dq_tunable = Tunable("flash_attention_dq", _dq_candidates)


def dq_triton(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None,
    launch: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq, delta)"""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    delta = torch.empty_like(lse)
    shared = Arguments(q, k, causal, window, scale, cu_seqlens)
    tiles = launch.arguments() if launch else dq_tunable.arguments(shared.key, q.device)
    block_m, block_n, block_d = tiles["BLOCK_M"], tiles["BLOCK_N"], shared.block_d
    dq_kernel[blocks(q.shape[1], block_m, cu_seqlens), q.shape[2], q.shape[0]](
        source(dout, block_m, block_d), source(q, block_m, block_d),
        source(k, block_n, block_d), source(v, block_n, block_d), source(out, block_m, block_d),
        lse, dq, delta, cu_seqlens, *strides(dout, q, k, v, out), *shared.sizes, **shared.constants, **tiles,
    )  # fmt: skip
    return dq, delta
