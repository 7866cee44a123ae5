"""Flash attention forward kernel for Hopper in Gluon, warp-specialised: one warp loads, the other warpgroups compute.

A program processes tiles of queries, 64 per computing warpgroup. The loading warp copies blocks of keys and values with TMA into
a ring in shared memory, from the diagonal back to the first key. A warpgroup issues the scores of a block, and the product of
the previous block's weights and values, before it starts the softmax. The warpgroups alternate on the tensor cores (ping-pong
scheduling): one multiplies while another computes exponentials.

A head is one slice of a power of two columns, or two: 80 columns are 64 and 16. Each slice has its own buffers, since TMA and the
tensor cores take powers of two only, and its own output accumulator. The scores of a block add up over the slices. Buffers and
descriptors are therefore tuples, with an element per slice.

Packed documents are separated by masks, not by TMA bounds. A block may hold values of the next document, which are multiplied by
zero. An infinity in the values of one document can therefore reach the previous document.
"""

# A tuple grows by an element per slice, known when a kernel is compiled. Python's types have tuples of a fixed length.
# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Not specialised: one kernel for all sizes and alignments of these arguments.
UNSPECIALIZED = ["cu_seqlens", "tokens", "keys", "heads", "group", "total", "sequences", "heads_together", "tiles", "window"]


@gluon.jit
def _tile(index, sizes, cu_seqlens, PACKED: gl.constexpr, CONSUMERS: gl.constexpr):
    """Position and sequence lengths of tile `index`. Heads are grouped so that their keys and values fit the L2 cache. Within a
    group, the last queries, which attend to the most keys, are scheduled first, so that short tiles balance the end."""
    tokens, keys, heads, _, _, sequences, heads_together, tiles = sizes
    group = index // (heads_together * tiles)
    first = group * heads_together
    index -= first * tiles
    together = gl.minimum(heads_together, sequences * heads - first)
    row = (tiles - 1 - index // together) * (CONSUMERS * 64)
    head = first + index % together
    sequence = head // heads
    head = head % heads
    start = 0
    if PACKED:
        start = gl.load(cu_seqlens + sequence)
        tokens = gl.load(cu_seqlens + sequence + 1) - start
        keys = tokens
        sequence = 0
    return sequence, head, row, start, tokens, keys


@gluon.jit
def _publish_next_tile(counter, schedule, step, index, COUNTED: gl.constexpr):
    """Loading warp: reserves the next tile and publishes it to the computing warpgroups. Where all tiles cost the same, a program
    takes every n-th, and all its warps know the next one."""
    if COUNTED:
        next_tile, full, empty = schedule
        index = gl.num_programs(0) + gl.atomic_add(counter, 1)
        mbarrier.wait(empty, (step & 1) ^ 1)
        next_tile.store(gl.full([1], index, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(full, count=1)
        return index
    else:
        return index + gl.num_programs(0)


@gluon.jit
def _wait_for_next_tile(schedule, step, index, COUNTED: gl.constexpr):
    if COUNTED:
        next_tile, full, empty = schedule
        mbarrier.wait(full, step & 1)
        index = gl.max(next_tile.load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
        mbarrier.arrive(empty, count=1)
        return index
    else:
        return index + gl.num_programs(0)


@gluon.jit
def _blocks(row, tokens, keys, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK: gl.constexpr):
    """Range of key blocks [low, high) of a tile. All its warpgroups use the same range, because they share the blocks."""
    end = keys
    low = 0
    if CAUSAL:
        end = gl.minimum(keys, row + CONSUMERS * 64 + keys - tokens)
    if WINDOW:
        low = gl.maximum(row + keys - tokens - window + 1, 0) // BLOCK
    return low, gl.cdiv(end, BLOCK)


@gluon.jit
def _copy(descriptors, sequence, head, row, full, buffers, slot):
    """Copies the slices of rows from `row` on into a slot. Its barrier completes a phase when the bytes of all slices have
    arrived: it expects them at once, before the first copy."""
    if len(descriptors) == 2:
        mbarrier.expect(full.index(slot), descriptors[0].block_type.nbytes + descriptors[1].block_type.nbytes)
    else:
        mbarrier.expect(full.index(slot), descriptors[0].block_type.nbytes)
    tma.async_copy_global_to_shared(descriptors[0], [sequence, head, row, 0], full.index(slot), buffers[0].index(slot))
    if len(descriptors) == 2:
        column: gl.constexpr = buffers[0].shape[4]
        tma.async_copy_global_to_shared(descriptors[1], [sequence, head, row, column], full.index(slot), buffers[1].index(slot))


@gluon.jit
def _load(
    descriptors, counter, memory, work,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    """Body of the loading warp."""
    buffers, barriers, schedule = memory
    sizes, window, cu_seqlens = work
    q_descs, k_descs, v_descs = descriptors
    q_buffers, k_rings, v_rings, _ = buffers
    CONSUMERS: gl.constexpr = q_buffers[0].shape[0]
    STAGES: gl.constexpr = k_rings[0].shape[0]
    BLOCK: gl.constexpr = k_rings[0].shape[3]
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    loaded = 0
    tile = 0
    step = 0
    index = gl.program_id(0)
    while index < sizes[4]:
        sequence, head, row, start, tokens, keys = _tile(index, sizes, cu_seqlens, PACKED, CONSUMERS)
        if row < tokens:
            kv_head = head // sizes[3]
            low, high = _blocks(row, tokens, keys, window, CAUSAL, WINDOW, CONSUMERS, BLOCK)
            for consumer in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(consumer), (tile & 1) ^ 1)
                _copy(q_descs, sequence, head, start + row + consumer * 64, q_full, q_buffers, consumer)
            for block in range(high - low):
                stage = loaded % STAGES
                phase = (loaded // STAGES) & 1
                key = start + (high - 1 - block) * BLOCK
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                _copy(k_descs, sequence, kv_head, key, k_full, k_rings, stage)
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                _copy(v_descs, sequence, kv_head, key, v_full, v_rings, stage)
                loaded += 1
            tile += 1
        index = _publish_next_tile(counter, schedule, step, index, COUNTED)
        step += 1


@gluon.jit
def _acquire_tensor_cores(consumer: gl.constexpr):
    """Waits for this warpgroup's slot on the tensor cores. Uses named barriers 12 and up: the compiler's own count from 0."""
    barrier = gl.full([128], 12 + consumer, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _release_tensor_cores(consumer: gl.constexpr):
    barrier = gl.full([128], 12 + consumer, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _mask(scores, key, row, tokens, keys, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Sets masked scores to minus infinity. The comparisons are inline assembly because LLVM would pack them into bit masks, with
    many more instructions and registers."""
    layout: gl.constexpr = scores.type.layout
    columns = (key + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout)))[None, :]
    own = row + keys - tokens + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))  # the key aligned with each query
    last = gl.minimum(own, keys - 1) if CAUSAL else own * 0 + (keys - 1)
    if WINDOW:
        first = own - window + 1
        return gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.le.s32 p, $2, $4; setp.ge.and.s32 p, $2, $3, p; selp.f32 $0, $1, 0fFF800000, p; }",
            "=f,f,r,r,r",
            [scores, columns, first[:, None], last[:, None]],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
            "=f,f,r,r",
            [scores, columns, last[:, None]],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )


@gluon.jit
def _softmax(
    scores, top, total, row, key, tokens, keys, window,
    SCALE: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Exponentials of a block's scores, the rescaling factor of earlier sums, and the new row maxima and sums."""
    if MASKED:
        scores = _mask(scores, key, row, tokens, keys, window, CAUSAL, WINDOW)
    new_top = gl.maximum(top, gl.max(scores, axis=1))
    offset = new_top * SCALE
    if MASKED:
        offset = gl.where(new_top == float("-inf"), 0.0, offset)  # no key attended to yet
    shrink = gl.exp2(top * SCALE - offset)
    weights = gl.exp2(scores * SCALE - offset[:, None])
    # Each thread sums its own columns, 2 of every 8. A row spans four threads, which are reduced at the end.
    part = gl.sum(gl.sum(weights.reshape([64, weights.shape[1] // 8, 4, 2]), axis=3), axis=1)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, part.type.layout), assert_trivial=True)[:, None] + part
    return weights, shrink, new_top, total


@gluon.jit
def _scores(q, k_rings, stage, layout: gl.constexpr):
    keys: gl.constexpr = k_rings[0].shape[3]
    scores = gl.zeros([64, keys], gl.float32, layout=layout)
    for part in gl.static_range(len(k_rings)):
        k = k_rings[part].index(stage).reshape([keys, k_rings[part].shape[4]]).permute((1, 0))
        scores = warpgroup_mma(q[part], k, scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def _pack(weights, dtype: gl.constexpr):
    """Packs two neighbouring weights into one integer to carry them to the next block: as half-precision values each would use a
    whole register."""
    even, odd = gl.split(weights.reshape([64, weights.shape[1] // 2, 2]))
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ROUND, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _add_slice(weights, v_ring, stage, out):
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out.type.layout, k_width=2)
    weights = gl.convert_layout(weights, layout, assert_trivial=True)
    return warpgroup_mma(weights, v_ring.index(stage).reshape([v_ring.shape[3], v_ring.shape[4]]), out, is_async=True)


@gluon.jit
def _add_values(packed, v_rings, stage, out):
    pairs = gl.join(packed, packed).reshape([64, packed.shape[1] * 2])
    weights = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [pairs], dtype=v_rings[0].dtype, is_pure=True, pack=2)
    added = ()
    for part in gl.static_range(len(v_rings)):
        added += (_add_slice(weights, v_rings[part], stage, out[part]),)
    return added


@gluon.jit
def _wait(out):
    """Waits for all products issued."""
    if len(out) == 2:
        return warpgroup_mma_wait(0, deps=[out[0], out[1]])
    else:
        return (warpgroup_mma_wait(0, deps=[out[0]]),)


@gluon.jit
def _scale(out, factors):
    scaled = ()
    for part in gl.static_range(len(out)):
        own = gl.convert_layout(factors, gl.SliceLayout(1, out[part].type.layout), assert_trivial=True)
        scaled += (out[part] * own[:, None],)
    return scaled


@gluon.jit
def _zeros(width: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])
    return gl.zeros([64, width], gl.float32, layout=layout)


@gluon.jit
def _load_rows(buffer):
    """Loads a slice in a layout whose warps store the longest runs of memory."""
    WIDTH: gl.constexpr = buffer.shape[1]
    return buffer.load(gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0]))


@gluon.jit
def _store(out, result, zero, start, row, tokens, heads, head, HEAD_DIM: gl.constexpr, COLUMN: gl.constexpr):
    """Stores a slice of a head's rows from `row` on. It begins at column COLUMN of the head, the sequence at row `start`."""
    layout: gl.constexpr = result.type.layout
    rows = zero + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = COLUMN + gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, layout))
    out_rows = out + ((start + row) * heads + head) * HEAD_DIM
    mask = (row + rows < tokens)[:, None]
    if COLUMN + result.shape[1] > HEAD_DIM:
        mask = mask & (columns < HEAD_DIM)[None, :]
    gl.store(out_rows + rows[:, None] * (heads * HEAD_DIM) + columns[None, :], result, mask=mask)


@gluon.jit
def _step(
    q, rings, barriers, state, row, key, tokens, keys, window,
    SCALE: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    consumer: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, score_layout: gl.constexpr,
):  # fmt: skip
    """Processes one block: its scores and softmax, and the values of the previous block."""
    k_rings, v_rings = rings
    k_full, k_empty, v_full, v_empty = barriers
    out, weights, top, total, seen = state
    stage = seen % STAGES
    before = (seen - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (seen // STAGES) & 1)
    _acquire_tensor_cores(consumer)
    scores = _scores(q, k_rings, stage, score_layout)
    mbarrier.wait(v_full.index(before), ((seen - 1) // STAGES) & 1)
    out = _add_values(weights, v_rings, before, out)
    _release_tensor_cores((consumer + 1) % CONSUMERS)
    scores = warpgroup_mma_wait(len(v_rings), deps=[scores])  # all but the products with values, one group of wgmma a slice
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, shrink, top, total = _softmax(scores, top, total, row, key, tokens, keys, window, SCALE, MASKED, CAUSAL, WINDOW)
    out = _wait(out)
    mbarrier.arrive(v_empty.index(before), count=1)
    return _scale(out, shrink), _pack(weights, v_rings[0].dtype), top, total, seen + 1


@gluon.jit
def _compute(
    out, lse, memory, work,
    SCALE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, COUNTED: gl.constexpr,
    HEAD_DIM: gl.constexpr, consumer: gl.constexpr,
):  # fmt: skip
    """Body of a computing warpgroup. HEAD_DIM columns of those in shared memory are the head's, the others are zero."""
    buffers, barriers, schedule = memory
    sizes, window, cu_seqlens = work
    q_buffers, k_rings, v_rings, out_buffers = buffers
    CONSUMERS: gl.constexpr = q_buffers[0].shape[0]
    STAGES: gl.constexpr = k_rings[0].shape[0]
    BLOCK: gl.constexpr = k_rings[0].shape[3]
    SLICES: gl.constexpr = len(k_rings)
    DIM: gl.constexpr = k_rings[0].shape[4] + (k_rings[1].shape[4] if SLICES == 2 else 0)
    # Otherwise the tensor cores read the queries from shared memory for every block: more than 128 dimensions do not fit in
    # registers, and with three warpgroups each thread has fewer registers.
    Q_IN_REGISTERS: gl.constexpr = CONSUMERS == 2 and DIM <= 128
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    rings = (k_rings, v_rings)
    ring_barriers = (k_full, k_empty, v_full, v_empty)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    LOG2_SCALE: gl.constexpr = SCALE * 1.4426950408889634
    heads = sizes[2]
    seen = 0
    tile = 0
    if consumer == CONSUMERS - 1:
        _release_tensor_cores(0)
    step = 0
    index = gl.program_id(0)
    while index < sizes[4]:
        sequence, head, tile_row, start, tokens, keys = _tile(index, sizes, cu_seqlens, PACKED, CONSUMERS)
        if tile_row < tokens:
            low, high = _blocks(tile_row, tokens, keys, window, CAUSAL, WINDOW, CONSUMERS, BLOCK)
            row = tile_row + consumer * 64
            # From `clear` back to `edge`, every query of this warpgroup attends to every key.
            clear = keys // BLOCK
            edge = low
            if CAUSAL:
                clear = gl.minimum(keys, row + keys - tokens + 1) // BLOCK
            clear = gl.minimum(clear, high - 1)
            if WINDOW:
                clear = gl.maximum(clear, low)
                edge = gl.minimum(gl.cdiv(gl.maximum(row + 64 + keys - tokens - window, 0), BLOCK), clear)

            shared_q = ()
            for part in gl.static_range(SLICES):
                shared_q += (q_buffers[part].index(consumer).reshape([64, q_buffers[part].shape[4]]),)
            mbarrier.wait(q_full.index(consumer), tile & 1)
            q = shared_q
            if Q_IN_REGISTERS:
                q = ()
                for part in gl.static_range(SLICES):
                    q += (shared_q[part].load(gl.DotOperandLayout(operand_index=0, parent=score_layout, k_width=2)),)
                fence_async_shared()
                mbarrier.arrive(q_empty.index(consumer), count=1)
            stage = seen % STAGES
            mbarrier.wait(k_full.index(stage), (seen // STAGES) & 1)
            _acquire_tensor_cores(consumer)
            scores = _scores(q, k_rings, stage, score_layout)
            _release_tensor_cores((consumer + 1) % CONSUMERS)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, score_layout))
            weights, _, top, total = _softmax(
                scores, top, 0.0, row, (high - 1) * BLOCK, tokens, keys, window, LOG2_SCALE, True, CAUSAL, WINDOW
            )
            zeros = ()
            for part in gl.static_range(SLICES):
                zeros += (_zeros(v_rings[part].shape[4]),)
            state = (zeros, _pack(weights, v_rings[0].dtype), top, total, seen + 1)
            if CAUSAL:
                for block in range(high - 1 - clear):
                    state = _step(
                        q, rings, ring_barriers, state, row, (high - 2 - block) * BLOCK, tokens, keys, window,
                        LOG2_SCALE, True, CAUSAL, WINDOW, consumer, CONSUMERS, STAGES, score_layout,
                    )  # fmt: skip
            for _ in range(clear - edge):
                state = _step(
                    q, rings, ring_barriers, state, row, 0, tokens, keys, window,
                    LOG2_SCALE, False, CAUSAL, WINDOW, consumer, CONSUMERS, STAGES, score_layout,
                )  # fmt: skip
            if WINDOW:
                for block in range(edge - low):
                    state = _step(
                        q, rings, ring_barriers, state, row, (edge - 1 - block) * BLOCK, tokens, keys, window,
                        LOG2_SCALE, True, CAUSAL, WINDOW, consumer, CONSUMERS, STAGES, score_layout,
                    )  # fmt: skip
            result, weights, top, total, seen = state
            if not Q_IN_REGISTERS and DIM <= 128:
                mbarrier.arrive(q_empty.index(consumer), count=1)
            stage = (seen - 1) % STAGES
            mbarrier.wait(v_full.index(stage), ((seen - 1) // STAGES) & 1)
            result = _wait(_add_values(weights, v_rings, stage, result))
            mbarrier.arrive(v_empty.index(stage), count=1)

            total = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, score_layout), assert_trivial=True)
            result = _scale(result, 1.0 / total)
            rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout))
            first = sequence.to(gl.int64) * sizes[0] + start
            lse_rows = lse + (sequence.to(gl.int64) * heads + head) * sizes[0] + start
            gl.store(lse_rows + rows, top * SCALE + gl.log2(total) * 0.6931471805599453, mask=rows < tokens)
            # Through shared memory, so that a warp stores full cache lines. The runtime zero keeps the address computation here:
            # hoisted out of the tile loop, it would use registers that the blocks need.
            zero = gl.minimum(row, 0)
            own_buffers = ()
            for part in gl.static_range(SLICES):
                out_buffer = (out_buffers if DIM <= 128 else q_buffers)[part].index(consumer + zero)
                own_buffers += (out_buffer.reshape([64, v_rings[part].shape[4]]),)
                own_buffers[part].store(result[part].to(v_rings[0].dtype))
            stored = ()
            for part in gl.static_range(SLICES):
                stored += (_load_rows(own_buffers[part]),)
            if DIM > 128:
                fence_async_shared()
                mbarrier.arrive(q_empty.index(consumer), count=1)
            for part in gl.static_range(SLICES):
                _store(out, stored[part], zero, first, row, tokens, heads, head, HEAD_DIM, part * v_rings[0].shape[4])
            tile += 1
        index = _wait_for_next_tile(schedule, step, index, COUNTED)
        step += 1


@gluon.jit
def _out_buffers(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, width: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(2 * width, 128), element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(dtype, [count, rows, width], layout)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    q_desc, k_desc, v_desc, q_tail, k_tail, v_tail, out, lse, cu_seqlens, counter,
    tokens, keys, heads, group, total, sequences, heads_together, tiles, window,
    SCALE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, COUNTED: gl.constexpr,
    CONSUMERS: gl.constexpr, BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr, DIM: gl.constexpr, TAIL: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    descriptors = ((q_desc,), (k_desc,), (v_desc,))
    q_buffers = (gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, DIM], q_desc.layout),)
    k_rings = (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, DIM], k_desc.layout),)
    v_rings = (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, DIM], v_desc.layout),)
    # With more than 128 dimensions, shared memory cannot hold the outputs next to the queries, so they reuse the query buffers.
    OUT_BUFFERS: gl.constexpr = CONSUMERS if DIM + TAIL <= 128 else 1
    OUT_ROWS: gl.constexpr = 64 if DIM + TAIL <= 128 else 8
    out_buffers = (_out_buffers(dtype, OUT_BUFFERS, OUT_ROWS, DIM),)
    if TAIL:
        descriptors = ((q_desc, q_tail), (k_desc, k_tail), (v_desc, v_tail))
        q_buffers += (gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, 64, TAIL], q_tail.layout),)
        k_rings += (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, TAIL], k_tail.layout),)
        v_rings += (gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK, TAIL], v_tail.layout),)
        out_buffers += (_out_buffers(dtype, OUT_BUFFERS, OUT_ROWS, TAIL),)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    next_tile = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    next_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    next_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(next_full, count=1)
    mbarrier.init(next_empty, count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(consumer), count=1)
        mbarrier.init(q_empty.index(consumer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    buffers = (q_buffers, k_rings, v_rings, out_buffers)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    memory = (buffers, barriers, (next_tile, next_full, next_empty))
    work = ((tokens, keys, heads, group, total, sequences, heads_together, tiles), window, cu_seqlens)
    # The constants are repeated in each tuple: in a named tuple variable they would become runtime values.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_compute, (out, lse, memory, work, SCALE, CAUSAL, WINDOW, PACKED, COUNTED, HEAD_DIM, 0)),
                (_compute, (out, lse, memory, work, SCALE, CAUSAL, WINDOW, PACKED, COUNTED, HEAD_DIM, 1)),
                (_load, (descriptors, counter, memory, work, CAUSAL, WINDOW, PACKED, COUNTED)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (out, lse, memory, work, SCALE, CAUSAL, WINDOW, PACKED, COUNTED, HEAD_DIM, 0)),
                (_compute, (out, lse, memory, work, SCALE, CAUSAL, WINDOW, PACKED, COUNTED, HEAD_DIM, 1)),
                (_compute, (out, lse, memory, work, SCALE, CAUSAL, WINDOW, PACKED, COUNTED, HEAD_DIM, 2)),
                (_load, (descriptors, counter, memory, work, CAUSAL, WINDOW, PACKED, COUNTED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
