"""Paged attention for sequences with one or a few queries, bound by reading the KV cache once.

The key tiles of all sequences are divided into chunks, one per resident program. A single long sequence fills the GPU as well as
many sequences of different lengths, and the host needs no lengths (CUDA graphs). A program stores an unnormalised partial result
for a part of a sequence, and the one that stores the last part merges them. The programs of one chunk, one per KV head, are
adjacent in the grid, so that heads adjacent in memory are read at about the same time. All query heads that share a KV head are
rows of one tile, for each of a sequence's few queries.

A chunk is a part of one sequence where that makes chunks at most slightly longer: to begin a sequence and to merge parts takes as
long as reading several tiles. Otherwise the tiles are concatenated and cut into equal chunks, also inside sequences.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from strata.kernels.ops.arrivals import multiprocessors, stream_arrivals
from strata.kernels.tuning.tunable import Config, Key, Tunable, architecture, bucket, config

LEAST_ROWS = 16  # of a matrix product
MOST_ROWS = 64  # queries times heads of a group; above this, compute takes longer than reading the cache
LEAST_TILES = 4  # of a chunk: merging many short partial results takes longer than reading their keys
EXTRA_SIZES = 8  # that are tried for chunks of one sequence each; a power of two
MERGED_VALUES = 2**12  # values held in registers
LEAST_WORD_DIMS = 128  # with fewer dims, the products of bytes are too small to share among the warps
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LOG2_E = 1.4426950408889634


@triton.jit
def count_key_tiles(
    context_lens,
    query_starts,
    seqs,
    least_queries,
    MAX_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Key tiles of every sequence [SEQS]; 0 for sequences with fewer or more queries than this launch handles. A sequence with
    queries and no keys has one empty tile, so that a program writes its zeros."""
    seq = tl.arange(0, SEQS)
    there = seq < seqs
    context = tl.load(context_lens + seq, mask=there, other=0)
    queries = tl.load(query_starts + seq + 1, mask=there, other=0) - tl.load(query_starts + seq, mask=there, other=0)
    tiles = tl.cdiv(context, BLOCK_N) - first_key_tile(context, queries, WINDOW, BLOCK_N)
    return tl.where((queries >= least_queries) & (queries <= MAX_QUERIES), tl.maximum(tiles, 1), 0)


@triton.jit
def half_queries(q_tile):
    """Queries in fp16, divided by a power of two per row, and these powers. fp8 keys become fp16 in one instruction per pair, and
    bf16 in several; the powers prevent an overflow of queries from bf16."""
    wide = q_tile.to(tl.float32)
    peak = tl.max(tl.abs(wide), 1)
    power = tl.maximum((peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1e-30)
    return (wide / power[:, None]).to(tl.float16), power


@triton.constexpr_function
def widening(byte):
    """Assembly for byte `byte` of two words, of adjacent keys: both fp8 numbers become one pair in fp16."""
    return (
        "{ .reg .b32 t; .reg .b16 h; "
        f"prmt.b32 t, $1, $2, 0x{(4 + byte) * 16 + byte:02x}; cvt.u16.u32 h, t; cvt.rn.f16x2.e4m3x2 $0, h; }}"
    )


@triton.jit
def widen(words, BYTE: tl.constexpr, COMPILED: tl.constexpr):
    """fp8 numbers in one byte of every word, in fp16. The interpreter has no inline assembly."""
    if COMPILED:
        CODE: tl.constexpr = widening(BYTE)
        return tl.inline_asm_elementwise(CODE, "=r,r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return ((words >> (8 * BYTE)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def first_key_tile(context, queries, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key tile that the first query attends to."""
    if WINDOW > 0:
        return tl.maximum(context - queries + 1 - WINDOW, 0) // BLOCK_N
    else:
        return context * 0


@triton.jit
def part_of(chunk, later, head, kv_heads, ROWS: tl.constexpr):
    """Row offset of a chunk's partial result: of its first sequence, or with `later` of its last."""
    return ((chunk.to(tl.int64) * 2 + later) * kv_heads + head) * ROWS


@triton.jit
def chunk_of(tile, size, longer):
    """The chunk that contains a tile. Chunks have `size` tiles, the first `longer` of them one more."""
    in_longer = longer * (size + 1)
    return tl.where(tile < in_longer, tile // (size + 1), longer + (tile - in_longer) // size)


@triton.jit
def merge(parts, slots, first, last, first_later, head, kv_heads, DIMS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Merges a sequence's partial results in chunks `first` to `last`, PARTS at a time. Loads bypass L1, which may be stale."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    best = tl.full([ROWS], -1e38, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(first, last + 1, PARTS):
        chunk = start + tl.arange(0, PARTS)
        there = (chunk <= last)[:, None]
        part = part_of(chunk, tl.where(chunk == first, first_later, 0), head, kv_heads, ROWS)[:, None] + rows[None, :]
        values = parts + part[:, :, None] * DIMS + dims[None, None, :]
        part_best = tl.load(parts + slots * DIMS + part, mask=there, other=-1e38, cache_modifier=".cg")
        part_weight = tl.load(parts + slots * (DIMS + 1) + part, mask=there, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(values, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        better = tl.maximum(best, tl.max(part_best, 0))
        share = tl.exp2(part_best - better[None, :])
        fade = tl.exp2(best - better)
        weight = weight * fade + tl.sum(part_weight * share, 0)
        acc = acc * fade[:, None] + tl.sum(part_acc * share[:, :, None], 0)
        best = better
    return acc / tl.where(weight > 0, weight, 1.0)[:, None]


@triton.jit
def store_rows(
    out,
    result,
    q_start,
    queries,
    head,
    out_token,
    out_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    M: tl.constexpr,
):
    rows, dims = tl.arange(0, M), tl.arange(0, DIMS)
    token, q_heads = rows // GROUP, head * GROUP + rows % GROUP
    target = out + (q_start + token).to(tl.int64)[:, None] * out_token + q_heads[:, None] * out_head + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(token < queries)[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["seqs", "least_queries", "table_seq"])
def decode_kernel(
    out,
    parts,  # partial results: values [programs, 2, kv_heads, ROWS, DIMS], then maxima and sums, each without DIMS
    arrivals,  # number of partial results stored so far [seqs, kv_heads], zero before and after a launch
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
    ROWS: tl.constexpr,  # rows of BLOCK_M that may hold queries
    PARTS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    EXTRA_SIZES: tl.constexpr,
    OVERLAPPED: tl.constexpr,  # the next kernel may begin before the end of this one
    WORDS: tl.constexpr,  # fp8 values are read in words of four dims
    COMPILED: tl.constexpr,
):
    FP8: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    head, kv_heads = tl.program_id(0), tl.num_programs(0)
    chunk = tl.program_id(1)
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    tiles = count_key_tiles(context_lens, query_starts, seqs, least_queries, ROWS // GROUP, WINDOW, BLOCK_N, SEQS)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    if total == 0:
        return
    seq_index = tl.arange(0, SEQS)
    programs = tl.num_programs(1)
    chunks = tl.minimum(programs, total)  # no chunk is empty
    size = total // chunks
    longer = total - size * chunks
    own_size = 2147483647
    if seqs <= programs:
        sizes = tl.maximum(tl.cdiv(total, programs), LEAST_TILES) + tl.arange(0, EXTRA_SIZES)
        fits = tl.sum(tl.cdiv(tiles[None, :], sizes[:, None]), 1) <= programs
        own_size = tl.min(tl.where(fits, sizes, 2147483647), 0)
    own = own_size < 2147483647  # each chunk is a part of one sequence: of chunks own_first to own_last
    own_first = chunk
    own_last = chunk
    if own:
        parts_of_seq = tl.cdiv(tiles, own_size)
        last_parts = tl.cumsum(parts_of_seq, 0)
        if chunk >= tl.sum(parts_of_seq, 0):
            return
        this = seq_index == tl.sum((last_parts <= chunk).to(tl.int32), 0)
        own_last = tl.sum(tl.where(this, last_parts, 0), 0) - 1
        own_parts = tl.sum(tl.where(this, parts_of_seq, 0), 0)
        own_first = own_last + 1 - own_parts
        own_tiles = tl.sum(tl.where(this, tiles, 0), 0)
        own_begin = tl.sum(tl.where(this, ends, 0), 0) - own_tiles
        begin = own_begin + own_tiles * (chunk - own_first) // own_parts
        end = own_begin + own_tiles * (chunk - own_first + 1) // own_parts
    else:
        if chunk >= chunks:
            return
        begin = chunk * size + tl.minimum(chunk, longer)
        end = begin + size + (chunk < longer).to(tl.int32)
    first_seq = tl.sum((ends <= begin).to(tl.int32), 0)
    last_seq = tl.sum((ends < end).to(tl.int32), 0)

    rows = tl.arange(0, BLOCK_M)
    token, q_heads = rows // GROUP, head * GROUP + rows % GROUP
    dims = tl.arange(0, DIMS)
    in_tile = tl.arange(0, BLOCK_N)
    k_base = key_cache + head.to(tl.int64) * k_head + dims[None, :]
    v_base = value_cache + head.to(tl.int64) * v_head + dims[None, :]

    if WORDS:
        # The tensor cores read pairs of keys, and neighbours in memory are dims, so that registers would be loaded byte by byte.
        # Words of four dims are loaded instead, and each of their bytes has a product of its own.
        quarter = tl.arange(0, DIMS // 4)
        words_base = value_cache.to(tl.pointer_type(tl.int32)) + head.to(tl.int64) * (v_head // 4) + quarter[None, :]

    for step in range(0, last_seq - first_seq + 1):
        seq = first_seq + step
        seq_end = tl.sum(tl.where(seq_index == seq, ends, 0), 0)
        seq_begin = seq_end - tl.sum(tl.where(seq_index == seq, tiles, 0), 0)
        if seq_begin < seq_end:
            lo, hi = tl.maximum(begin, seq_begin), tl.minimum(end, seq_end)
            context = tl.load(context_lens + seq)
            q_start = tl.load(query_starts + seq)
            queries = tl.load(query_starts + seq + 1) - q_start
            shift = first_key_tile(context, queries, WINDOW, BLOCK_N) - seq_begin
            position = context - queries + token
            wanted = (token < queries)[:, None] & (dims < HEAD_DIM)[None, :]
            q_rows = (q_start + token).to(tl.int64)[:, None]
            q_tile = tl.load(q + q_rows * q_token + q_heads[:, None] * q_head + dims[None, :], mask=wanted, other=0.0)
            table = block_tables + seq.to(tl.int64) * table_seq
            if FP8:
                q_tile, power = half_queries(q_tile)
                score_scale = (power * SCALE * tl.load(k_scale))[:, None]

            best = tl.full([BLOCK_M], -1e38, tl.float32)  # finite, to avoid inf - inf in a row that attends to no key
            weight = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, DIMS], tl.float32)
            if WORDS:
                acc0 = tl.zeros([BLOCK_M, DIMS // 4], tl.float32)
                acc1, acc2, acc3 = acc0, acc0, acc0
            # Block numbers are loaded one tile ahead: a load that depends on another load is pipelined half as deep.
            keys = (lo + shift) * BLOCK_N + in_tile
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < context, other=0)
            for tile in range(lo + shift, hi + shift):
                keys = tile * BLOCK_N + in_tile
                block, slot = blocks.to(tl.int64), keys % BLOCK_SIZE
                blocks = tl.load(table + (keys + BLOCK_N) // BLOCK_SIZE, mask=keys + BLOCK_N < context, other=0)
                there = (keys < context)[:, None]  # slots beyond the context may hold NaN
                if HEAD_DIM < DIMS:
                    there &= (dims < HEAD_DIM)[None, :]
                k = tl.load(k_base + (block * k_block + slot * k_slot)[:, None], mask=there, other=0.0)
                if WORDS:
                    within = (keys < context)[:, None]
                    if HEAD_DIM < DIMS:
                        within &= (quarter * 4 < HEAD_DIM)[None, :]
                    words = tl.load(words_base + (block * (v_block // 4) + slot * (v_slot // 4))[:, None], mask=within, other=0)
                else:
                    v = tl.load(v_base + (block * v_block + slot * v_slot)[:, None], mask=there, other=0.0)
                if FP8:
                    k = k.to(tl.float16)
                    if not WORDS:
                        v = v.to(tl.float16)
                scores = tl.dot(q_tile, k.T, input_precision="ieee") * (score_scale if FP8 else SCALE)
                seen = keys[None, :] <= position[:, None]
                if WINDOW > 0:
                    seen &= keys[None, :] > position[:, None] - WINDOW
                scores = tl.where(seen, scores, float("-inf"))
                better = tl.maximum(best, tl.max(scores, 1))
                p = tl.exp2(scores - better[:, None])
                fade = tl.exp2(best - better)
                weight = weight * fade + tl.sum(p, 1)
                if WORDS:
                    half = p.to(tl.float16)
                    acc0 = tl.dot(half, widen(words, 0, COMPILED), acc0 * fade[:, None])
                    acc1 = tl.dot(half, widen(words, 1, COMPILED), acc1 * fade[:, None])
                    acc2 = tl.dot(half, widen(words, 2, COMPILED), acc2 * fade[:, None])
                    acc3 = tl.dot(half, widen(words, 3, COMPILED), acc3 * fade[:, None])
                else:
                    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
                best = better
            if WORDS:
                acc = tl.reshape(tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3)), [BLOCK_M, DIMS])
            if FP8:
                acc *= tl.load(v_scale)

            if (lo == seq_begin) & (hi == seq_end):
                result = acc / tl.where(weight > 0, weight, 1.0)[:, None]
                store_rows(out, result, q_start, queries, head, out_token, out_head, GROUP, HEAD_DIM, DIMS, BLOCK_M)
            else:
                slots = tl.num_programs(1).to(tl.int64) * 2 * kv_heads * ROWS
                part = part_of(chunk, (lo > begin).to(tl.int32), head, kv_heads, ROWS) + rows
                tl.store(parts + part[:, None] * DIMS + dims[None, :], acc, mask=(token < queries)[:, None])
                tl.store(parts + slots * DIMS + part, best, mask=token < queries)
                tl.store(parts + slots * (DIMS + 1) + part, weight, mask=token < queries)
                first = tl.where(own, own_first, chunk_of(seq_begin, size, longer))
                last = tl.where(own, own_last, chunk_of(seq_end - 1, size, longer))
                tl.debug_barrier()  # all threads have stored before the arrival is counted
                before = tl.atomic_add(arrivals + seq * kv_heads + head, 1, sem="acq_rel", scope="gpu")
                if before == last - first:
                    tl.store(arrivals + seq * kv_heads + head, 0)  # reset for the next launch
                    first_later = ((first * size + tl.minimum(first, longer) < seq_begin) & (own == 0)).to(tl.int32)
                    result = merge(parts, slots, first, last, first_later, head, kv_heads, DIMS, ROWS, PARTS)
                    store_rows(out, result, q_start, queries, head, out_token, out_head, GROUP, HEAD_DIM, DIMS, ROWS)


def candidates(arch: int, key: Key) -> list[Config]:
    """PROGRAMS is the number of resident programs per SM, or a multiple. Caches in fp8 need twice the instructions per byte, and
    programs of a single warp spend none of their time at barriers; more rows than 16 would spill its registers."""
    if arch == 0:
        return [config(BLOCK_N=16, PROGRAMS=1)]
    dims, rows, item_bytes = map(int, key)
    warps = 8 if rows * dims > 64 * 128 else 4
    tile = min(max(2**14 // (dims * item_bytes), 16), 128)  # 16 KiB of keys and 16 KiB of values; longer tiles spill
    alone = [config(num_warps=1, num_stages=3, BLOCK_N=32, PROGRAMS=8)] if item_bytes == 1 and rows * dims <= 16 * 128 else []
    return [
        *alone,
        config(num_warps=warps, num_stages=3, BLOCK_N=tile, PROGRAMS=2),
        config(num_warps=warps, num_stages=3, BLOCK_N=tile, PROGRAMS=4),
        config(num_warps=warps, num_stages=4, BLOCK_N=tile, PROGRAMS=2),
        config(num_warps=8, num_stages=3, BLOCK_N=tile, PROGRAMS=2),
        config(num_warps=warps, num_stages=2, BLOCK_N=2 * tile, PROGRAMS=2),
        config(num_warps=warps, num_stages=3, BLOCK_N=2 * tile, PROGRAMS=1),
        config(num_warps=warps, num_stages=6, BLOCK_N=max(tile // 2, 16), PROGRAMS=2),
    ]


decode_tunable = Tunable("paged_attention_decode", candidates)


def padded_seqs(seqs: int) -> int:
    """Sequence count a kernel is compiled for: few distinct values, the smallest for sums within a single warp."""
    return 32 if seqs <= 32 else max(256, bucket(seqs))


def rows_for(queries: int, group: int) -> int:
    return bucket(queries * group)


def in_words(cache: Tensor) -> bool:
    """An fp8 cache whose rows are aligned to words of four dims."""
    return not any(one % 4 for one in (cache.storage_offset(), cache.shape[3], *cache.stride()[:3]))


def decode_triton(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    out: Tensor,
    most_queries: int,
    max_context_len: int,
    scale: float,
    window: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    arrivals: Tensor | None = None,
    least_queries: int = 1,
    chosen: dict[str, int] | None = None,
) -> None:
    """Processes sequences with `least_queries` to `most_queries` queries, or slightly more if they fit a tile, and leaves other
    rows unchanged. `arrivals` holds at least seqs * kv_heads zeros and must not be shared with a concurrent launch."""
    heads, head_dim = q.shape[1:]
    _, block_size, kv_heads, _ = key_cache.shape
    seqs, group, dims = context_lens.shape[0], heads // kv_heads, max(bucket(head_dim), 16)
    rows = rows_for(most_queries, group)
    arguments = dict(chosen or decode_tunable.arguments((dims, max(rows, LEAST_ROWS), key_cache.element_size()), q.device))
    programs = max(multiprocessors(q.device) * arguments.pop("PROGRAMS") // kv_heads, 1)
    programs = min(programs, seqs * max(-(-max_context_len // (LEAST_TILES * arguments["BLOCK_N"])), 1))
    overlapped = architecture(q.device) >= 90
    parts = torch.empty(programs * 2 * kv_heads * rows * (dims + 2), dtype=torch.float32, device=q.device)
    if arrivals is None or arrivals.shape[0] < seqs * kv_heads:
        arrivals = stream_arrivals(seqs * kv_heads, q.device)
    decode_kernel[(kv_heads, programs)](
        out,
        parts,
        arrivals,
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
        BLOCK_M=max(rows, LEAST_ROWS),
        ROWS=rows,
        PARTS=max(MERGED_VALUES // (rows * dims), 1),
        LEAST_TILES=LEAST_TILES,
        EXTRA_SIZES=EXTRA_SIZES,
        OVERLAPPED=overlapped,
        launch_pdl=overlapped,
        WORDS=k_scale is not None and dims >= LEAST_WORD_DIMS and in_words(value_cache),
        COMPILED=not INTERPRETED,
        **arguments,
    )
