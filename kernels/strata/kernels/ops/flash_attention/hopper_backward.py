"""Flash attention backward for Hopper in Gluon: five wgmma products, tiles loaded by TMA from a dedicated warp.

A program owns 128 keys of a key/value head and loops over the query tiles that attend to them, for every query head of the group.
It keeps dk and dv in registers and works on transposed scores S' = K Q', so that the registers of P' and dS' are already in the
operand layout of the next product. Only dS passes through shared memory, for dq. Five products are the minimum. They require many
programs to add to one dq tile, so dq is accumulated in fp32 in global memory, in the order in which programs arrive: **two runs
differ in the last bits of dq**. (A deterministic backward needs seven products, or programs that wait for each other.)

Three overlaps keep the tensor cores busy: the scores of the next tile start before dq of this tile is written; exp overlaps with
dP' = V dO'; dS overlaps with the product for dv. Everything barely fits into 240 registers. Before moving a line, read the
comments in `differentiate`, and check that ptxas reports neither spills nor serialised wgmma.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from strata.kernels.tuning.tunable import architecture

KEYS = 128  # keys per program
QUERIES = {64: 128, 128: 64}  # queries per step by head dim: the most that 240 registers per thread hold
STAGES = 3  # query tiles in shared memory: one in use, one whose scores are in flight, one loading
HEADS_TOGETHER = gl.constexpr(2)  # measured: among 1, 2, 4, 8 and 32 the fastest or close to it, with and without GQA
WARPS = 8
REGISTERS = 168  # 65536 over the 12 warps of a program; the loading warps release theirs, up to 240 for the 8 that compute
GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@triton.jit
def document(cu_seqlens, sequence, rows, PACKED: tl.constexpr):
    """First row of a sequence in its batch entry, and its number of rows."""
    start = 0
    if PACKED:
        start = tl.load(cu_seqlens + sequence)
        rows = tl.load(cu_seqlens + sequence + 1) - start
    return start, rows


@triton.jit
def first_slot(start, sequence, heads, tiles, QUERIES: tl.constexpr, PACKED: tl.constexpr):
    """First slot of a sequence. Each query tile has its own slot for statistics and dq, so that the last tile of a document does
    not overlap the next document. A head has `tiles` slots per sequence, or for all packed documents together."""
    slot = sequence * heads * tiles
    if PACKED:
        slot = start // QUERIES + sequence
    return slot


@triton.jit(do_not_specialize=["tokens", "heads", "tiles", "lse_b", "lse_h"])
def prepare_kernel(
    dout, out, lse, statistics, dq_sums, cu_seqlens, tokens, heads, tiles,
    dout_b, dout_t, dout_h, out_b, out_t, out_h, lse_b, lse_h, D: tl.constexpr, QUERIES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Writes lse in base 2, then -delta = -sum(dout * out), for each query tile, and zeroes the dq accumulators. Rows past the
    end, and rows that attend to no key, get an infinite lse: their probabilities are 0."""
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    tile = tl.program_id(1)
    start, tokens = document(cu_seqlens, sequence, tokens, PACKED)
    if tile * QUERIES >= tokens:
        return
    slot = (first_slot(start, sequence, heads, tiles, QUERIES, PACKED) + head * tiles + tile).to(tl.int64)
    batch = (sequence * (not PACKED)).to(tl.int64)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    inside = row < tokens
    token = (start + row).to(tl.int64)
    dim = tl.arange(0, D)
    o = tl.load(out + batch * out_b + head * out_h + token[:, None] * out_t + dim, mask=inside[:, None], other=0.0)
    do = tl.load(dout + batch * dout_b + head * dout_h + token[:, None] * dout_t + dim, mask=inside[:, None], other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    sums = tl.load(lse + batch * lse_b + head * lse_h + token, mask=inside, other=float("-inf"))
    at = statistics + slot * (2 * QUERIES) + tl.arange(0, QUERIES)
    tl.store(at, tl.where(sums == float("-inf"), float("inf"), sums * 1.4426950408889634))
    tl.store(at + QUERIES, -delta)
    tl.store(dq_sums + slot * (QUERIES * D) + tl.arange(0, QUERIES * D), tl.zeros([QUERIES * D], tl.float32))


@triton.jit(do_not_specialize=["tokens", "heads", "tiles"])
def finish_kernel(
    dq_sums,
    dq,
    cu_seqlens,
    tokens,
    heads,
    tiles,
    scale: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Converts the fp32 dq sums, stored in the register order of `add_to_dq`, to dq."""
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    tile = tl.program_id(1)
    start, tokens = document(cu_seqlens, sequence, tokens, PACKED)
    if tile * QUERIES >= tokens:
        return
    slot = (first_slot(start, sequence, heads, tiles, QUERIES, PACKED) + head * tiles + tile).to(tl.int64)
    sums = tl.load(dq_sums + slot * (QUERIES * D) + tl.arange(0, QUERIES * D))
    columns: tl.constexpr = 128 // QUERIES  # warpgroups side by side
    sums = tl.reshape(sums, [QUERIES // 16, columns, D // columns // 8, 8, 4, 2, 2])
    sums = tl.reshape(tl.permute(sums, [0, 5, 3, 1, 2, 4, 6]), [QUERIES, D])
    row = tile * QUERIES + tl.arange(0, QUERIES)
    token = (start + row + sequence * (not PACKED) * tokens).to(tl.int64)
    at = dq + (token[:, None] * heads + head) * D + tl.arange(0, D)
    tl.store(at, (sums * scale).to(dq.dtype.element_ty), mask=row[:, None] < tokens)


@gluon.jit
def add_to_dq(at, dq):
    """Adds the 32 sums of a thread with 8 vector reductions of 4 values. The slot is therefore stored in register order: for each
    16 x 8 block, which a warp holds in 4 registers per thread, thread after thread."""
    QUERIES: gl.constexpr = dq.shape[0]
    D: gl.constexpr = dq.shape[1]
    COLUMNS: gl.constexpr = 128 // QUERIES  # warpgroups side by side
    WIDTH: gl.constexpr = D // COLUMNS
    by_register: gl.constexpr = [QUERIES // 16, 2, 8, COLUMNS, WIDTH // 8, 4, 2]
    row = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, dq.type.layout))[:, None]
    column = gl.arange(0, D, layout=gl.SliceLayout(0, dq.type.layout))[None, :]
    block = (row // 16 * COLUMNS + column // WIDTH) * (WIDTH // 8) + column % WIDTH // 8
    place = gl.reshape(block * 128 + (row % 8) * 16 + (column % 8 // 2) * 4, by_register)
    sums = gl.permute(gl.reshape(dq, by_register), (0, 3, 4, 2, 5, 1, 6))
    left, right = gl.split(sums)
    upper_left, lower_left = gl.split(left)
    upper_right, lower_right = gl.split(right)
    place, _ = gl.split(gl.permute(place, (0, 3, 4, 2, 5, 1, 6)))
    place, _ = gl.split(place)
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",  # an elementwise operation must have a result
        "=r,l,f,f,f,f",
        [(at + place).to(gl.int64), upper_left, upper_right, lower_left, lower_right],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_tiles(descriptors, tiles, barriers, sequence, position, steps, STAGES: gl.constexpr):
    """Body of the loading warp: the keys and values of the program, then each query tile into the next free stage."""
    q_desc, k_desc, v_desc, dout_desc, statistics_desc = descriptors
    q_tiles, k_tile, v_tile, dout_tiles, statistics = tiles
    keys_ready, ready, free = barriers
    batch, start, slot, slots_of_head = sequence
    key_start, kv_head, group, first, last = position
    QUERIES: gl.constexpr = q_desc.block_shape[1]
    mbarrier.expect(keys_ready, k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
    tma.async_copy_global_to_shared(k_desc, [batch, start + key_start, kv_head, 0], keys_ready, k_tile.index(0))
    tma.async_copy_global_to_shared(v_desc, [batch, start + key_start, kv_head, 0], keys_ready, v_tile.index(0))
    tile = first
    head = kv_head * group
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), step // STAGES + 1 & 1)
        filled = ready.index(stage)
        mbarrier.expect(filled, q_desc.nbytes_per_cta + dout_desc.nbytes_per_cta + statistics_desc.nbytes_per_cta)
        query = start + tile * QUERIES
        tma.async_copy_global_to_shared(q_desc, [batch, query, head, 0], filled, q_tiles.index(stage))
        of_tile = (slot + head * slots_of_head + tile) * (2 * QUERIES)
        tma.async_copy_global_to_shared(statistics_desc, [of_tile], filled, statistics.index(stage))
        tma.async_copy_global_to_shared(dout_desc, [batch, query, head, 0], filled, dout_tiles.index(stage))
        tile += 1
        if tile == last:
            tile = first
            head += 1


@gluon.jit
def differentiate(
    tiles, ds_tile, columns, barriers, sequence, position, steps, gradients, tokens, keys, window,
    scale: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Body of the eight computing warps."""
    q_tiles, k_tile, v_tile, dout_tiles, statistics = tiles
    keys_ready, ready, free = barriers
    batch, start, slot, slots_of_head = sequence
    key_start, kv_head, group, first, last = position
    dq_sums, dk_desc, dv_desc, dk, dv = gradients
    dtype: gl.constexpr = q_tiles.dtype
    QUERIES: gl.constexpr = q_tiles.shape[2]
    KEYS: gl.constexpr = k_tile.shape[2]
    D: gl.constexpr = k_tile.shape[4]
    COLUMNS: gl.constexpr = 128 // QUERIES  # warpgroups side by side in dq
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, QUERIES, 16])
    dkv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8 // COLUMNS, COLUMNS], [16, D // COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dkv_layout, 2)
    by_query: gl.constexpr = gl.SliceLayout(0, s_layout)
    s_zero = gl.zeros([KEYS, QUERIES], gl.float32, s_layout)
    dq_zero = gl.zeros([QUERIES, D], gl.float32, dq_layout)
    dk_sum = warpgroup_mma_init(gl.zeros([KEYS, D], gl.float32, dkv_layout))
    dv_sum = gl.zeros([KEYS, D], gl.float32, dkv_layout)

    key = key_start + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
    columns.store(gl.arange(0, QUERIES, by_query))
    offset = keys - tokens  # the last query is aligned with the last key
    tile = first
    head = kv_head * group
    mbarrier.wait(keys_ready, 0)
    mbarrier.wait(ready.index(0), 0, pred=steps > 0)
    q_next = q_tiles.index(0).reshape([QUERIES, D])
    s_next = warpgroup_mma(k_tile.index(0).reshape([KEYS, D]), q_next.permute((1, 0)), s_zero, use_acc=False, is_async=True)
    # Waits immediately: ptxas serialises all products if accumulators (dk, dv) are zeroed while a product is in flight.
    s_next = warpgroup_mma_init(warpgroup_mma_wait(0, deps=(s_next,)))
    for step in range(steps):
        # Always 0, but unknown to the compiler, which would otherwise keep all operand descriptors in registers across the loop.
        nil = step >> 24
        k = k_tile.index(nil).reshape([KEYS, D])
        v = v_tile.index(nil).reshape([KEYS, D])
        ds_shared = ds_tile.index(nil)
        stage = step % STAGES
        q = q_tiles.index(stage).reshape([QUERIES, D])
        dout = dout_tiles.index(stage).reshape([QUERIES, D])
        s, dk_sum = warpgroup_mma_wait(0, deps=(s_next, dk_sum))

        diagonal = tile * QUERIES + offset  # the last key that the first query of the tile attends to
        masked = key_start + KEYS > keys
        if CAUSAL:
            masked = masked | (diagonal < key_start + KEYS - 1)
        if WINDOWED:
            masked = masked | (diagonal + QUERIES - 1 - window >= key_start)
        if masked:
            visible = (key < keys)[:, None]
            if CAUSAL:
                # Loaded from shared memory for the same reason: the compiler would keep these 16 or 32 values in registers.
                last_seen = (diagonal + columns.load(by_query))[None, :]
                visible = visible & (key[:, None] <= last_seen)
                if WINDOWED:
                    visible = visible & (key[:, None] > last_seen - window)
            s = gl.where(visible, s, float("-inf"))

        # dP' - delta is one product with -delta as its initial accumulator.
        minus_delta = statistics.index(stage).slice(QUERIES, QUERIES).load(by_query)
        dp_from, _ = gl.broadcast(minus_delta[None, :], s)
        dp = warpgroup_mma(v, dout.permute((1, 0)), dp_from, is_async=True)
        lse = statistics.index(stage).slice(0, QUERIES).load(by_query)
        p = gl.exp2(s * (scale * 1.4426950408889634) - lse[None, :])
        dv_next = warpgroup_mma(gl.convert_layout(p.to(dtype), operand, assert_trivial=True), dout, dv_sum, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * dp).to(dtype)
        ds_shared.store(ds)
        fence_async_shared()
        # All warps have finished the previous step here (by the barrier in arrive), so its stage can be loaded again.
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
        dq = warpgroup_mma(ds_shared.permute((1, 0)), k, dq_zero, use_acc=False, is_async=True)
        dv_sum = warpgroup_mma_wait(1, deps=(dv_next,))  # frees the registers of P' before more are needed
        dk_sum = warpgroup_mma(gl.convert_layout(ds, operand, assert_trivial=True), q, dk_sum, is_async=True)
        # Scores of the next tile. After the last tile they are undefined and unused.
        ahead = step + 1
        mbarrier.wait(ready.index(ahead % STAGES), ahead // STAGES & 1, pred=ahead < steps)
        q_next = q_tiles.index(ahead % STAGES).reshape([QUERIES, D])
        s_next = warpgroup_mma(k, q_next.permute((1, 0)), s_zero, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(2, deps=(dq,))
        add_to_dq(dq_sums + (slot + head * slots_of_head + tile).to(gl.int64) * (QUERIES * D), dq)
        tile += 1
        if tile == last:
            tile = first
            head += 1
    _, dk_sum = warpgroup_mma_wait(0, deps=(s_next, dk_sum))

    dk_tile = (dk_sum * scale).to(dtype)
    dv_tile = dv_sum.to(dtype)
    if PACKED and key_start + KEYS > keys:  # a TMA store would overwrite the next document
        kv_heads = dk_desc.shape[2]
        row = start + key_start + gl.arange(0, KEYS, gl.SliceLayout(1, dkv_layout))
        column = kv_head * D + gl.arange(0, D, gl.SliceLayout(0, dkv_layout))
        at = row.to(gl.int64)[:, None] * (kv_heads * D) + column[None, :]
        inside = (row < start + keys)[:, None]
        gl.store(dk + at, dk_tile, mask=inside)
        gl.store(dv + at, dv_tile, mask=inside)
    else:
        k_tile.index(0).reshape([KEYS, D]).store(dk_tile)
        v_tile.index(0).reshape([KEYS, D]).store(dv_tile)
        fence_async_shared()
        gl.barrier()
        tma.async_copy_shared_to_global(dk_desc, [batch, start + key_start, kv_head, 0], k_tile.index(0))
        tma.async_copy_shared_to_global(dv_desc, [batch, start + key_start, kv_head, 0], v_tile.index(0))
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "kv_heads", "key_tiles", "slots_of_head", "window"])
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, statistics_desc, dq_sums, dk_desc, dv_desc, dk, dv, cu_seqlens,
    tokens, keys, heads, kv_heads, key_tiles, slots_of_head, window,
    scale: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Programs are scheduled in groups of heads. Within a group, keys that the most queries attend to come first, so that the
    last programs are short. Groups are small, so that concurrent programs read the same queries."""
    dtype: gl.constexpr = q_desc.dtype
    QUERIES: gl.constexpr = q_desc.block_shape[1]
    KEYS: gl.constexpr = k_desc.block_shape[1]
    D: gl.constexpr = q_desc.block_shape[3]
    before = gl.program_id(0) // (HEADS_TOGETHER * key_tiles) * HEADS_TOGETHER
    together = gl.minimum(gl.num_programs(0) // key_tiles - before, HEADS_TOGETHER)
    place = gl.program_id(0) - before * key_tiles
    key_start = place // together * KEYS
    batch = (before + place % together) // kv_heads
    kv_head = (before + place % together) % kv_heads
    group = heads // kv_heads
    start = 0
    slot = batch * heads * slots_of_head
    if PACKED:
        start = gl.load(cu_seqlens + batch)
        tokens = gl.load(cu_seqlens + batch + 1) - start
        keys = tokens
        slot = start // QUERIES + batch
        batch = 0
        if key_start >= keys:
            return
    first = 0
    last = gl.cdiv(tokens, QUERIES)
    if CAUSAL:
        first = gl.maximum(key_start - (keys - tokens), 0) // QUERIES
    if WINDOWED:
        last = gl.minimum(last, gl.cdiv(gl.maximum(key_start + KEYS - 1 + window - (keys - tokens), 0), QUERIES))
    steps = gl.maximum(last - first, 0) * group

    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, QUERIES, 1, D], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, QUERIES, 1, D], dout_desc.layout)
    statistics = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * QUERIES], statistics_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, 1, KEYS, 1, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, 1, KEYS, 1, D], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], dtype)
    ds_tile = gl.allocate_shared_memory(dtype, [1, KEYS, QUERIES], ds_layout)
    columns = gl.allocate_shared_memory(gl.int32, [QUERIES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)

    tiles = (q_tiles, k_tile, v_tile, dout_tiles, statistics)
    barriers = (keys_ready, ready, free)
    sequence = (batch, start, slot, slots_of_head)
    position = (key_start, kv_head, group, first, last)
    descriptors = (q_desc, k_desc, v_desc, dout_desc, statistics_desc)
    gradients = (dq_sums, dk_desc, dv_desc, dk, dv)
    gl.warp_specialize(
        [
            (differentiate, (
                tiles, ds_tile, columns, barriers, sequence, position, steps, gradients, tokens, keys, window,
                scale, CAUSAL, WINDOWED, PACKED, STAGES,
            )),
            (load_tiles, (descriptors, tiles, barriers, sequence, position, steps, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip


@cache
def _layouts(e: int, dtype: torch.dtype) -> tuple[gl.NVMMASharedLayout, gl.NVMMASharedLayout]:
    tile = gl.NVMMASharedLayout.get_default_for([1, KEYS, 1, e], GLUON_TYPES[dtype])
    return tile, gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def _tma_can_read(x: Tensor) -> bool:
    return x.stride(-1) == 1 and all(n > 0 and n % 8 == 0 for n in x.stride()[:-1]) and x.data_ptr() % 16 == 0


def supports(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, cu_seqlens: Tensor | None) -> bool:
    return (
        architecture(q.device) == 90
        and q.dtype in GLUON_TYPES
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] in QUERIES
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and min(*q.shape, *k.shape) > 0
        and (not causal or q.shape[1] <= k.shape[1])
        and (window is None or causal)
        and (cu_seqlens is None or (q.shape[0] == 1 and q.shape[1] == k.shape[1]))
        and all(_tma_can_read(x) for x in (q, k, v))
    )


def backward(
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
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv. Requires that `supports` returns True, and a positive scale. lse [b, h, t] is the natural log-sum-exp."""
    b, t, h, e = q.shape
    s, kv = k.shape[1:3]
    if not _tma_can_read(dout):  # for example the gradient of a sum, a single value expanded
        dout = dout.contiguous()
    packed = cu_seqlens is not None
    sequences = len(cu_seqlens) - 1 if cu_seqlens is not None else b
    longest = (max_seqlen or t) if packed else t
    tiles = triton.cdiv(longest, QUERIES[e])
    slots_of_head = t // QUERIES[e] + sequences if packed else tiles
    slots = h * slots_of_head * (1 if packed else b)
    key_tiles = triton.cdiv(longest if packed else s, KEYS)

    new = q.new_zeros if packed else q.new_empty  # tokens after the last document have a gradient of 0
    dq, dk, dv = new(b, t, h, e), new(b, s, kv, e), new(b, s, kv, e)
    statistics = q.new_empty(slots * 2 * QUERIES[e], dtype=torch.float32)
    dq_sums = q.new_empty(slots * QUERIES[e] * e, dtype=torch.float32)
    tile_layout, statistics_layout = _layouts(e, q.dtype)
    q_desc, dout_desc = (TensorDescriptor.from_tensor(x, [1, QUERIES[e], 1, e], tile_layout) for x in (q, dout))
    k_desc, v_desc, dk_desc, dv_desc = (TensorDescriptor.from_tensor(x, [1, KEYS, 1, e], tile_layout) for x in (k, v, dk, dv))
    statistics_desc = TensorDescriptor.from_tensor(statistics, [2 * QUERIES[e]], statistics_layout)
    cu = cu_seqlens if packed else dq_sums  # unused placeholder if not packed
    prepare_kernel[(sequences * h, tiles)](
        dout, out, lse, statistics, dq_sums, cu, t, h, slots_of_head,
        *dout.stride()[:3], *out.stride()[:3], *lse.stride()[:2], D=e, QUERIES=QUERIES[e], PACKED=packed,
    )  # fmt: skip
    backward_kernel[(key_tiles * sequences * kv,)](
        q_desc, k_desc, v_desc, dout_desc, statistics_desc, dq_sums, dk_desc, dv_desc, dk, dv, cu,
        t, s, h, kv, key_tiles, slots_of_head, window or 0,
        scale=scale, CAUSAL=causal, WINDOWED=window is not None, PACKED=packed, STAGES=STAGES,
        num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    finish_kernel[(sequences * h, tiles)](
        dq_sums, dq, cu, t, h, slots_of_head, scale=scale, D=e, QUERIES=QUERIES[e], PACKED=packed
    )
    return dq, dk, dv
