"""Flash attention forward in plain Triton, for every shape and architecture without a specialised kernel.

A program holds a block of queries of one head and loops over the keys they attend to, with a running maximum and sum (online
softmax). Keys are processed in three loops: masked where a window begins, unmasked, and masked on the causal diagonal or at the
end of the sequence. The last query is aligned with the last key: with fewer queries than keys, query i is at key position
i + s - t. Scores are in base two, with log2(e) folded into the scale, because the hardware has exp2.

Tiles are loaded by TMA if the architecture has it and the strides allow it. One thread issues a TMA load, while pointer loads
need registers for addresses, which the accumulators need.

Each packed document has its own blocks. The first block of document d is number cu_seqlens[d] // BLOCK + d, an upper bound on the
blocks of all earlier documents. A program finds its document by bisection, and the host needs no lengths.
"""

import math
from collections.abc import Callable, Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from strata.kernels.tuning.tunable import Config, Key, Tunable, TuningCase, architecture, config

LOG2E: float = math.log2(math.e)
RUNTIME_SIZES = ["t", "s", "documents", "window"]  # not specialised: no recompilation if one becomes 1 or a multiple of 16


@triton.jit
def document_of(block, cu_seqlens, documents, BLOCK: tl.constexpr):
    """(block within the document, the document's first token, its length)"""
    low = 0
    high = documents
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // BLOCK + middle <= block:
            low = middle
        else:
            high = middle
    first = tl.load(cu_seqlens + low)
    return block - (first // BLOCK + low), first, tl.load(cu_seqlens + low + 1) - first


@triton.jit
def load_rows(
    source, strides, place, row, size, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Loads a tile of BLOCK tokens of one head, starting at `row`. `source` is a pointer or a TMA descriptor; `place` is (batch,
    first token of the document, head, tokens per batch entry). With MASKED, rows from `size` on are zero. TMA loads rows of the
    next document there instead, which zero weights cancel unless they are not finite."""
    batch, first, head, tokens = place
    if isinstance(source, tl.tensor_descriptor):
        tile = source.load([batch * tokens + first + row, head * BLOCK_D])
    else:
        stride_b, stride_t, stride_h = strides
        steps = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        start = tl.cast(batch, tl.int64) * stride_b + tl.cast(first + row, tl.int64) * stride_t + head * stride_h
        pointers = source + start + (steps[:, None] * stride_t + columns[None, :])
        if MASKED and HEAD_DIM != BLOCK_D:
            tile = tl.load(pointers, mask=(row + steps < size)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            tile = tl.load(pointers, mask=(row + steps < size)[:, None], other=0.0)
        elif HEAD_DIM != BLOCK_D:
            tile = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(target, tile, place, row, size, heads, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores a tile into a contiguous [batch, tokens, heads, HEAD_DIM]."""
    batch, first, head, tokens = place
    rows = row + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    start = ((tl.cast(batch, tl.int64) * tokens + first + row) * heads + head) * HEAD_DIM
    pointers = target + start + (tl.arange(0, BLOCK)[:, None] * (heads * HEAD_DIM) + columns[None, :])
    tl.store(pointers, tile.to(target.dtype.element_ty), mask=(rows < size)[:, None] & (columns < HEAD_DIM)[None, :])


@triton.jit
def seen(positions, keys, s, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Mask of the keys that a query at `positions` attends to. One argument is a row, the other a column."""
    mask = (keys < s) & (positions == positions)
    if CAUSAL:
        mask = mask & (keys <= positions)
    if WINDOWED:
        mask = mask & (positions - keys < window)
        if not CAUSAL:
            mask = mask & (keys - positions < window)
    return mask


@triton.jit
def key_bounds(start, t, s, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(low, full_low, full_high, high) for the queries from `start`. No query attends to keys outside low..high; every query
    attends to all keys of full_low..full_high. The first three are multiples of BLOCK_N."""
    first = start + s - t
    last = min(start + BLOCK_M, t) - 1 + s - t
    low = 0
    full_low = 0
    high = s
    full_high = s
    if CAUSAL:
        high = last + 1
        full_high = first + 1
    elif WINDOWED:
        high = min(last + window, s)
        full_high = min(first + window, s)
    if WINDOWED:
        low = max(first - window + 1, 0) // BLOCK_N * BLOCK_N
        full_low = tl.cdiv(max(last - window + 1, 0), BLOCK_N) * BLOCK_N
    full_high = max(full_high, 0) // BLOCK_N * BLOCK_N
    return low, full_low, full_high, high


@triton.jit
def _attend(
    state,
    q,
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
    """Updates `state` (weighted sum of values, sum of weights, largest score) with the keys of low..high."""
    acc, total, peak = state
    for start in tl.range(low, high, BLOCK_N):
        k = load_rows(k_source, k_strides, place, start, s, MASKED, HEAD_DIM, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            scores = tl.where(seen(positions[:, None], keys[None, :], s, window, CAUSAL, WINDOWED), scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * SCALE)
        shift = new_peak
        if MASKED:  # avoids inf - inf before a query has attended to a key
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(scores * SCALE - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_rows(v_source, v_strides, place, start, s, MASKED, HEAD_DIM, BLOCK_N, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def forward_kernel(
    q_source,
    k_source,
    v_source,
    out_pointer,
    lse_pointer,
    cu_seqlens,
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
        q = load_rows(q_source, (q_stride_b, q_stride_t, q_stride_h), own, start, t, True, HEAD_DIM, BLOCK_M, BLOCK_D)
        rows = start + tl.arange(0, BLOCK_M)
        positions = rows + s - t
        low, full_low, full_high, high = key_bounds(start, t, s, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
        state = (
            tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
            tl.zeros((BLOCK_M,), tl.float32),
            tl.full((BLOCK_M,), float("-inf"), tl.float32),
        )
        if WINDOWED:
            state = _attend(
                state, q, k_source, v_source, k_strides, v_strides, shared, low, min(full_low, high), positions, s, window,
                True, CAUSAL, WINDOWED, SCALE, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        state = _attend(
            state, q, k_source, v_source, k_strides, v_strides, shared, full_low, full_high, positions, s, window,
            False, CAUSAL, WINDOWED, SCALE, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        state = _attend(
            state, q, k_source, v_source, k_strides, v_strides, shared, max(full_low, full_high), high, positions, s, window,
            True, CAUSAL, WINDOWED, SCALE, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        acc, total, peak = state
        total = tl.where(total == 0.0, 1.0, total)
        out = acc / total[:, None]
        store_rows(out_pointer, out, own, start, t, heads, HEAD_DIM, BLOCK_M, BLOCK_D)
        lse = (peak + tl.log2(total)) * 0.6931471805599453  # ln 2; -inf for a query that attends to no key
        tl.store(lse_pointer + (tl.cast(batch, tl.int64) * heads + head) * tokens + first + rows, lse, mask=rows < t)


Tiles = tuple[int, int, int, int]  # BLOCK_M, BLOCK_N, warps, stages


def shared_kib(arch: int) -> int:
    """Shared memory per SM in KiB; consumer GPUs have less."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(arch, 99)


def configs(arch: int, tiles: Iterable[Tiles], kib: Callable[[int, int, int], float]) -> list[Config]:
    """Configurations whose tiles fit; `kib(BLOCK_M, BLOCK_N, stages)` is their shared memory. On Hopper, small tiles and few
    warps are fastest: two programs share an SM, and one uses the tensor cores while the other computes exponentials."""
    return [
        config(BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in tiles
        if kib(m, n, stages) <= shared_kib(arch)
    ]


def _candidates(arch: int, key: Key) -> list[Config]:
    block_d, itemsize, *_ = (int(part) for part in key)
    large = shared_kib(arch) > 200
    if arch == 0:
        return [config(BLOCK_M=32, BLOCK_N=32)]
    if itemsize == 4:
        tiles = [(64, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1)]
    elif block_d <= 64:
        tiles = [(64, 128, 4, 3), (64, 128, 4, 2), (128, 64, 4, 4)] if large else [(128, 64, 4, 3), (128, 64, 4, 2)]
    elif block_d == 128:
        tiles = [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2)] if large else [(128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)]
    else:
        tiles = [(128, 64, 8, 2), (64, 64, 4, 1), (64, 32, 4, 2)] if large else [(64, 64, 4, 2), (64, 32, 4, 1), (32, 16, 4, 2)]
    return configs(arch, tiles, lambda m, n, stages: (m + 2 * n * stages) * block_d * itemsize / 1024)


FORWARD = Tunable("flash_attention_forward", _candidates)


class Arguments:
    """Launch arguments shared by the three kernels of a call, and the key of their tuned tiles."""

    def __init__(self, q: Tensor, k: Tensor, causal: bool, window: int | None, scale: float, cu_seqlens: Tensor | None) -> None:
        _, t, h, e = q.shape
        s, kv = k.shape[1:3]
        windowed = window is not None and window < max(t, s)  # a window that covers everything is dropped: faster without
        self.block_d = max(16, triton.next_power_of_2(e))  # tensor cores need at least 16, and tiles are powers of two
        self.key: Key = (self.block_d, q.element_size(), int(causal), int(windowed))
        self.sizes = (t, s, 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, window if windowed else 0)
        self.constants = {
            "GROUP": h // kv,
            "SCALE": scale * LOG2E,
            "CAUSAL": causal,
            "WINDOWED": windowed,
            "PACKED": cu_seqlens is not None,
            # three tf32 products are as accurate as one fp32 product; a single one has three digits
            "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
            "HEAD_DIM": e,
            "BLOCK_D": self.block_d,
        }


def strides(*tensors: Tensor) -> list[int]:
    """Strides of batch, tokens and heads; the last stride is 1."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def tma_supports(x: Tensor) -> bool:
    """True if TMA can load tiles of x. Requires half precision (tf32x3 products need tiles in registers), a matrix of all tokens
    by all heads with rows aligned to 16 bytes, and a head as wide as its tile, because the next head begins where it ends."""
    b, t, h, e = x.shape
    stride_b, stride_t, stride_h, _ = x.stride()
    matrix = (b == 1 or stride_b == t * stride_t) and (h == 1 or stride_h == e) and stride_t >= h * e
    aligned = stride_t * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return architecture(x.device) >= 90 and x.element_size() == 2 and matrix and aligned and e in (16, 32, 64, 128, 256)


def source(x: Tensor, block: int, block_d: int) -> Tensor | TensorDescriptor:
    if not tma_supports(x):
        return x
    b, t, h, e = x.shape
    return TensorDescriptor(x, [b * t, h * e], [x.stride(1), 1], [block, block_d])


def blocks(tokens: int, block: int, cu_seqlens: Tensor | None) -> int:
    return triton.cdiv(tokens, block) if cu_seqlens is None else tokens // block + cu_seqlens.shape[0] - 1


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    launch: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse); `max_seqlen` is used only by other implementations."""
    b, t, h, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((b, h, t), dtype=torch.float32, device=q.device)
    shared = Arguments(q, k, causal, window, scale, cu_seqlens)
    tiles = launch.arguments() if launch else FORWARD.arguments(shared.key, q.device)
    block_m, block_n, block_d = tiles["BLOCK_M"], tiles["BLOCK_N"], shared.block_d
    forward_kernel[blocks(t, block_m, cu_seqlens), h, b](
        source(q, block_m, block_d), source(k, block_n, block_d), source(v, block_n, block_d), out, lse, cu_seqlens,
        *strides(q, k, v), *shared.sizes, **shared.constants, **tiles,
    )  # fmt: skip
    return out, lse


SHAPES_TO_TUNE = [
    (dim, heads, causal, window)
    for dim, heads in ((64, 32), (128, 16), (256, 8))
    for causal, window in ((True, None), (False, None), (True, 1024))
]


def tuning_cases(device: torch.device) -> list[TuningCase]:
    return [_tuning_case(device, *shape) for shape in SHAPES_TO_TUNE]


def _tuning_case(device: torch.device, dim: int, heads: int, causal: bool, window: int | None) -> TuningCase:
    q, k, v = (torch.randn(2, 8192, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(3))

    def run(launch: Config) -> None:
        forward(q, k, v, causal, window, dim**-0.5, None, 8192, launch)

    return TuningCase(FORWARD, Arguments(q, k, causal, window, 1.0, None).key, run)
