"""Gradients of the keys and values in plain Triton.

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
    load_rows,
    seen,
    shared_kib,
    source,
    store_rows,
    strides,
)
from strata.kernels.ops.flash_attention.portable_dq import load_lse
from strata.kernels.tuning.tunable import Config, Key, Tunable, config


@triton.jit
def query_bounds(start, t, s, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(low, full_low, full_high, high) for the keys from `start`. Queries outside low..high attend to none of them; queries of
    full_low..full_high attend to all. The first three are multiples of BLOCK_M."""
    first = start - (s - t)
    last = min(start + BLOCK_N, s) - 1 - (s - t)
    low = 0
    full_low = 0
    high = t
    full_high = t
    if CAUSAL:
        low = max(first, 0) // BLOCK_M * BLOCK_M
        full_low = tl.cdiv(max(last, 0), BLOCK_M) * BLOCK_M
    elif WINDOWED:
        low = max(first - window + 1, 0) // BLOCK_M * BLOCK_M
        full_low = tl.cdiv(max(last - window + 1, 0), BLOCK_M) * BLOCK_M
    if WINDOWED:
        high = min(last + window, t)
        full_high = min(first + window, t)
    full_high = max(full_high, 0) // BLOCK_M * BLOCK_M
    return low, full_low, full_high, high


@triton.jit
def _add_to_dk_dv(
    dk,
    dv,
    k,
    v,
    q_source,
    d_out_source,
    q_strides,
    d_out_strides,
    place,
    lse_pointers,
    delta_pointers,
    low,
    high,
    keys,
    t,
    s,
    window,
    MASKED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    for start in tl.range(low, high, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_source, q_strides, place, start, t, MASKED, HEAD_DIM, BLOCK_M, BLOCK_D)
        lse = load_lse(lse_pointers + rows, rows < t)
        scores = tl.dot(k, q.T, input_precision=PRECISION)
        p = tl.exp2(scores * SCALE - lse[None, :])
        if MASKED:
            positions = rows + s - t
            p = tl.where(seen(positions[None, :], keys[:, None], s, window, CAUSAL, WINDOWED), p, 0.0)
        d_out = load_rows(d_out_source, d_out_strides, place, start, t, MASKED, HEAD_DIM, BLOCK_M, BLOCK_D)
        if DV:
            dv = tl.dot(p.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
        if DK:
            dp = tl.dot(v, d_out.T, input_precision=PRECISION)
            delta = tl.load(delta_pointers + rows, mask=rows < t, other=0.0)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def dk_dv_kernel(
    d_out_source,
    q_source,
    k_source,
    v_source,
    lse_pointer,
    delta_pointer,
    dk_pointer,
    dv_pointer,
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
    t,
    s,
    documents,
    window,
    DK: tl.constexpr,
    DV: tl.constexpr,
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
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    batch = tl.program_id(2)
    tokens = t
    kv_tokens = s
    first = 0
    if PACKED:
        block, first, s = document_of(block, cu_seqlens, documents, BLOCK_N)
        t = s
    start = block * BLOCK_N
    if start < s:
        own = (batch, first, kv_head, kv_tokens)
        q_strides = (q_stride_b, q_stride_t, q_stride_h)
        d_out_strides = (d_out_stride_b, d_out_stride_t, d_out_stride_h)
        k = load_rows(k_source, (k_stride_b, k_stride_t, k_stride_h), own, start, s, True, HEAD_DIM, BLOCK_N, BLOCK_D)
        v = load_rows(v_source, (v_stride_b, v_stride_t, v_stride_h), own, start, s, True, HEAD_DIM, BLOCK_N, BLOCK_D)
        keys = start + tl.arange(0, BLOCK_N)
        low, full_low, full_high, high = query_bounds(start, t, s, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
        dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            place = (batch, first, head, tokens)
            of_head = (tl.cast(batch, tl.int64) * kv_heads * GROUP + head) * tokens + first
            lse_pointers = lse_pointer + of_head
            delta_pointers = delta_pointer + of_head
            if CAUSAL or WINDOWED:
                dk, dv = _add_to_dk_dv(
                    dk, dv, k, v, q_source, d_out_source, q_strides, d_out_strides, place, lse_pointers, delta_pointers,
                    low, min(full_low, high), keys, t, s, window,
                    True, DK, DV, CAUSAL, WINDOWED, SCALE, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M,
                )  # fmt: skip
            dk, dv = _add_to_dk_dv(
                dk, dv, k, v, q_source, d_out_source, q_strides, d_out_strides, place, lse_pointers, delta_pointers,
                full_low, full_high, keys, t, s, window,
                False, DK, DV, CAUSAL, WINDOWED, SCALE, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M,
            )  # fmt: skip
            dk, dv = _add_to_dk_dv(
                dk, dv, k, v, q_source, d_out_source, q_strides, d_out_strides, place, lse_pointers, delta_pointers,
                max(full_low, full_high), high, keys, t, s, window,
                True, DK, DV, CAUSAL, WINDOWED, SCALE, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M,
            )  # fmt: skip
        if DK:
            dk = dk * (SCALE * 0.6931471805599453)  # ln 2 converts the scale back to base e
            store_rows(dk_pointer, dk, own, start, s, kv_heads, HEAD_DIM, BLOCK_N, BLOCK_D)
        if DV:
            store_rows(dv_pointer, dv, own, start, s, kv_heads, HEAD_DIM, BLOCK_N, BLOCK_D)


def _dk_dv_candidates(arch: int, key: Key) -> list[Config]:
    block_d, itemsize, _, _, with_dk, with_dv = (int(part) for part in key)
    large = shared_kib(arch) > 200
    if arch == 0:
        return [config(BLOCK_M=32, BLOCK_N=32)]
    if itemsize == 4:
        tiles = [(32, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1)]
    elif block_d <= 64:
        tiles = [(64, 64, 4, 3), (32, 64, 4, 3), (128, 64, 4, 2)] if large else [(64, 128, 8, 2), (64, 64, 4, 2)]
    elif block_d == 128:
        tiles = [(64, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2)] if large else [(64, 128, 8, 2), (32, 64, 4, 2)]
    elif with_dv:
        tiles = [(64, 128, 8, 2), (32, 128, 8, 4)] if large else [(64, 64, 8, 1), (32, 64, 4, 1)]
    else:
        tiles = [(32, 128, 8, 2), (32, 128, 8, 3)] if large else [(32, 64, 8, 1), (16, 32, 4, 1)]
    return configs(arch, tiles, lambda m, n, stages: (n * (1 + with_dk) + 2 * m * stages) * block_d * itemsize / 1024)


dk_dv_tunable = Tunable("flash_attention_dk_dv", _dk_dv_candidates)


def dk_dv_triton(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty_like(dk)
    shared = Arguments(q, k, causal, window, scale, cu_seqlens)
    for with_dk, with_dv in gradients_per_launch(shared.block_d):
        tiles = dk_dv_tunable.arguments((*shared.key, int(with_dk), int(with_dv)), q.device)
        launch_dk_dv(dout, q, k, v, lse, delta, dk, dv, cu_seqlens, shared, with_dk, with_dv, tiles)
    return dk, dv


def gradients_per_launch(block_d: int) -> list[tuple[bool, bool]]:
    """(dK, dV) computed by each launch of the kernel. Registers hold both for head dimensions up to 128. For wider heads,
    computing the scores twice is faster than tiles of half the size."""
    return [(True, True)] if block_d <= 128 else [(True, False), (False, True)]


def launch_dk_dv(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens: Tensor | None,
    shared: Arguments,
    with_dk: bool,
    with_dv: bool,
    tiles: dict[str, int],
) -> None:
    block_m, block_n, block_d = tiles["BLOCK_M"], tiles["BLOCK_N"], shared.block_d
    dk_dv_kernel[blocks(k.shape[1], block_n, cu_seqlens), k.shape[2], k.shape[0]](
        source(dout, block_m, block_d), source(q, block_m, block_d),
        source(k, block_n, block_d), source(v, block_n, block_d),
        lse, delta, dk, dv, cu_seqlens, *strides(dout, q, k, v), *shared.sizes,
        DK=with_dk, DV=with_dv, **shared.constants, **tiles,
    )  # fmt: skip
