"""Samples a token of each row in one pass over the logits.

Every program reads a tile of a row, 16 lines of 1024 tokens. A segment of the tile is 4 neighbouring columns: a thread holds all
of its tokens, and reduces them without the other threads. A program stores the largest logit of each segment and, if the row
needs it, the sum of weights. The program that stores the last tile of a row selects its token while others read further rows.
Segment maxima bound the thresholds of top-k and top-p from below: only segments that reach the bound are read
again, and tokens that reach it become candidates. Few candidates are compared each with every other, in one step; among more,
bisection finds the exact thresholds. If a flat distribution has more candidates than fit, the bisection reads the row instead.
Weights are summed in fp32.

A row without a filter draws a segment, then a token of it. Nothing depends on the other rows or on the order of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.arrivals import stream_arrivals
from strata.kernels.ops.sample.noise import log2_noise_of
from strata.kernels.tuning.tunable import Config, Key, Tunable, bucket, config

LINES, COLUMNS, RUN = 16, 1024, 4  # of a tile; columns of a segment
SEGMENT = LINES * RUN
TILE = LINES * COLUMNS
CANDIDATES = 4096  # that fit the buffer of a row
LOG2_E = 1.4426950408889634
GREEDY = 1e-5  # temperatures below select the largest logit
LOWEST = -1e37  # stands for -inf, whose differences are NaN


@triton.jit
def load_scaled(pointers, mask, scale):
    """Logits times `scale`, finite."""
    return tl.maximum(tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32) * scale, -1e37)


@triton.jit
def ordered(x):
    """An int32 with the order of x."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def between(low, high, tries):
    """A key strictly between two ordered keys that are not adjacent. Means of values converge quickly on candidates that are
    spread; means of keys separate neighbours of any size in at most 32 tries."""
    lowest = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    highest = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    middle = tl.where(tries < 12, ordered(lowest * 0.5 + highest * 0.5), (low & high) + ((low ^ high) >> 1))
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def fetch(values, tokens, logits, start, count, scale, flat, BLOCK: tl.constexpr):
    """A block of candidates and their tokens, from the buffer or, if `flat`, from the row. Missing ones are below any
    threshold."""
    index = start + tl.arange(0, BLOCK)
    mask = index < count
    buffered = tl.load(values + index, mask=mask & (flat == 0), other=-3e38)
    token = tl.load(tokens + index, mask=mask & (flat == 0), other=0)
    read = load_scaled(logits + index, mask & (flat != 0), scale)
    return tl.where(mask & (flat != 0), read, buffered), tl.where(flat != 0, index, token)


@triton.jit
def above(values, tokens, logits, count, scale, flat, threshold, largest, BLOCK: tl.constexpr):
    """Number and weight of candidates from `threshold` on."""
    found = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        x, _ = fetch(values, tokens, logits, start, count, scale, flat, BLOCK)
        passed = ordered(x) >= threshold
        found += passed.to(tl.int32)
        weight += tl.where(passed, tl.exp2(x - largest), 0.0)
    return tl.sum(found, 0), tl.sum(weight, 0)


@triton.jit
def draw(values, tokens, logits, count, scale, flat, bound, largest, total, k, p, seed, step, BLOCK: tl.constexpr):
    """Draws among the candidates from `bound` on: the k largest with their ties, then the fewest largest of these with a share p
    of their weight, again with ties. `total` is the weight of a row without other filters, or 0."""
    low = ordered(bound)
    end = ordered(largest) + 1
    high = end
    found, weight = above(values, tokens, logits, count, scale, flat, low, largest, BLOCK)
    most = found
    least = 0
    # Invariant: `most` candidates from low on, at least k if there were as many; `least` < k from high on.
    tries = 0
    while (most > k) & (low + 1 < high):
        middle = between(low, high, tries)
        tries += 1
        found, mass = above(values, tokens, logits, count, scale, flat, middle, largest, BLOCK)
        if found >= k:
            low = middle
            most = found
            weight = mass
        else:
            high = middle
    if p < 1:
        target = p * tl.where(total > 0, total, weight)
        high = end
        tries = 0
        # As above, for weights. One candidate between low and high settles the set.
        while (most - least > 1) & (low + 1 < high):
            middle = between(low, high, tries)
            tries += 1
            found, mass = above(values, tokens, logits, count, scale, flat, middle, largest, BLOCK)
            if mass >= target:
                low = middle
                most = found
            else:
                high = middle
                least = found
    best = -3e38
    token = 0
    for start in range(0, count, BLOCK):
        x, ids = fetch(values, tokens, logits, start, count, scale, flat, BLOCK)
        score = tl.where(ordered(x) >= low, x - log2_noise_of(seed, step, ids, 0), -3e38)
        block_best = tl.max(score, 0)
        block_token = tl.min(tl.where(score == block_best, ids, 2147483647), 0)
        better = (block_best > best) | ((block_best == best) & (block_token < token))
        token = tl.where(better, block_token, token)
        best = tl.where(better, block_best, best)
    return token


@triton.jit
def draw_of_few(values, tokens, count, largest, total, k, p, seed, step, greedy, FEW: tl.constexpr):
    """`draw` among at most FEW candidates. One passes top-k if fewer than k are larger, and top-p if the larger ones weigh less
    than the share p."""
    AT_ONCE: tl.constexpr = 16
    own = tl.arange(0, FEW)
    x = tl.load(values + own, mask=own < count, other=-3e38)
    ids = tl.load(tokens + own, mask=own < count, other=2147483647)
    larger = tl.zeros([FEW], tl.int32)
    mass = tl.zeros([FEW], tl.float32)
    for start in range(0, count, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        y = tl.load(values + other, mask=other < count, other=-3e38)
        more = y[None, :] > x[:, None]
        larger += tl.sum(more.to(tl.int32), 1)
        mass += tl.sum(tl.where(more, tl.exp2(y - largest)[None, :], 0.0), 1)
    passed = (larger < k) & (own < count)
    weight = tl.sum(tl.where(passed, tl.exp2(x - largest), 0.0), 0)
    passed &= mass < tl.where(p < 1, p, 2.0) * tl.where(total > 0, total, weight)
    score = tl.where(passed, x - tl.where(greedy, 0.0, log2_noise_of(seed, step, ids, 0)), -3e38)
    return tl.min(tl.where(score == tl.max(score, 0), ids, 2147483647), 0)


@triton.jit
def first_largest(logits, vocabulary, scale, largest, BLOCK: tl.constexpr):
    """The first token whose scaled logit is the largest."""
    token = 2147483647
    for start in range(0, vocabulary, BLOCK):
        index = start + tl.arange(0, BLOCK)
        reached = (load_scaled(logits + index, index < vocabulary, scale) >= largest) & (index < vocabulary)
        token = tl.minimum(token, tl.min(tl.where(reached, index, 2147483647), 0))
    return token


@triton.jit
def bound_of_top_k(maxima, largest, k):
    """A threshold that at least k segments reach, close to the k-th largest maximum."""
    low = tl.min(tl.where(maxima > -2e38, maxima, largest), 0)
    near = largest - 200.0  # the steps start here if they can: segments without an allowed token are far below
    if tl.sum((maxima >= near).to(tl.int32), 0) >= k:
        low = tl.maximum(low, near)
    high = largest
    found = k + 1
    for _ in range(0, 24):
        if found != k:
            middle = low + (high - low) * 0.5
            found = tl.sum((maxima >= middle).to(tl.int32), 0)
            if found >= k:
                low = middle
            else:
                high = middle
    return low


@triton.jit
def bound_of_top_p(maxima, weights, largest, p, total, SEGMENT: tl.constexpr):
    """A threshold below which the weight is at most 1 - p. Of a segment, at most all of its weight is below, or SEGMENT times the
    weight of the threshold."""
    dropped = (1 - p) * total * 0.9999
    low = largest - 80.0
    high = largest
    for _ in range(0, 16):
        middle = low + (high - low) * 0.5
        below = tl.where(maxima < middle, weights, tl.minimum(weights, SEGMENT * tl.exp2(middle - largest)))
        if tl.sum(below, 0) <= dropped:
            low = middle
        else:
            high = middle
    at_low = tl.sum(tl.where(maxima < low, weights, tl.minimum(weights, SEGMENT * tl.exp2(low - largest))), 0)
    return tl.where(at_low <= dropped, low, -1e37)


@triton.jit(do_not_specialize=["rows"])
def sample_kernel(
    out,
    maxima,  # of segments [rows, segments]
    sums,  # of weights relative to the segment's maximum [rows, segments]
    listed,  # segments to read again [rows, segments]
    values,  # candidates [rows, CANDIDATES]
    tokens,  # of the candidates
    arrivals,  # [rows], zero before and after a launch
    logits,
    seeds,
    steps,
    temperature,
    top_k,
    top_p,
    min_p,
    row_stride,
    vocabulary,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    SEGMENTS: tl.constexpr,  # of a row, rounded up to a power of two
    CANDIDATES: tl.constexpr,
    TILES: tl.constexpr,  # of a program
    GATHER: tl.constexpr,  # tokens read again at once
    BLOCK: tl.constexpr,  # candidates at once
    FEW: tl.constexpr,  # candidates that are compared each with every other
):
    TILE: tl.constexpr = LINES * COLUMNS
    SEGMENT: tl.constexpr = LINES * RUN
    OF_TILE: tl.constexpr = COLUMNS // RUN
    AGAIN: tl.constexpr = GATHER // SEGMENT
    parts = tl.num_programs(0)
    part, row = tl.program_id(0), tl.program_id(1)
    segments = tl.cdiv(vocabulary, TILE) * OF_TILE
    row_logits = logits + row.to(tl.int64) * row_stride
    row_maxima, row_sums, row_listed = maxima + row * segments, sums + row * segments, listed + row * segments
    heat = tl.load(temperature + row)
    greedy = heat < 1e-5
    scale = tl.where(greedy, 1.0, tl.math.div_rn(1.4426950408889634, tl.where(greedy, 1.0, heat)))
    k = vocabulary
    p = 1.0
    share = 0.0
    if TOP_K:
        given_k = tl.load(top_k + row).to(tl.int32)
        k = tl.where((given_k > 0) & (given_k < vocabulary), given_k, vocabulary)
    if TOP_P:
        p = tl.load(top_p + row)
    if MIN_P:
        share = tl.load(min_p + row)
    summed = (greedy == 0) & (k == vocabulary) & (share <= 0)  # top-k and min-p need no weights of segments
    line, column = tl.arange(0, LINES), tl.arange(0, COLUMNS)
    for tile in range(part * TILES, part * TILES + TILES):
        index = tile * TILE + line[:, None] * COLUMNS + column[None, :]
        raw = tl.load(row_logits + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
        # The scale is positive, and rounding keeps the order: the largest product is that of the largest logit.
        peak = tl.maximum(tl.max(tl.reshape(tl.max(raw, 0), [OF_TILE, RUN]), 1) * scale, -1e37)
        segment = tile * OF_TILE + tl.arange(0, OF_TILE)
        tl.store(row_maxima + segment, peak, mask=segment < segments)
        if summed:
            peaks_of_columns = tl.reshape(tl.broadcast_to(peak[:, None], [OF_TILE, RUN]), [COLUMNS])
            weights_of_tile = tl.exp2(tl.maximum(raw * scale, -1e37) - peaks_of_columns[None, :])
            mass = tl.sum(tl.where(index < vocabulary, weights_of_tile, 0.0), 0)
            tl.store(row_sums + segment, tl.sum(tl.reshape(mass, [OF_TILE, RUN]), 1), mask=segment < segments)

    tl.debug_barrier()  # all threads have stored before the arrival is counted
    before = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
    if before == parts - 1:
        tl.store(arrivals + row, 0)  # reset for the next launch
        all_segments = tl.arange(0, SEGMENTS)
        there = all_segments < segments
        # Loads bypass L1, which may be stale.
        peaks = tl.load(row_maxima + all_segments, mask=there, other=-3e38, cache_modifier=".cg")
        largest = tl.max(peaks, 0)
        seed = tl.load(seeds + row)
        step = tl.load(steps + row).to(tl.int32)
        in_segment = tl.arange(0, SEGMENT)
        offset = in_segment // RUN * COLUMNS + in_segment % RUN
        if summed & (p >= 1):
            sum_of = tl.load(row_sums + all_segments, mask=there, other=0.0, cache_modifier=".cg")
            mass = tl.where(there & (sum_of > 0), peaks + tl.log2(tl.where(sum_of > 0, sum_of, 1.0)), -3e38)
            race = mass - log2_noise_of(seed, step, all_segments, 1)
            chosen = tl.min(tl.where(race == tl.max(race, 0), all_segments, SEGMENTS), 0)
            index = chosen // OF_TILE * TILE + chosen % OF_TILE * RUN + offset
            x = load_scaled(row_logits + index, index < vocabulary, scale)
            score = tl.where(index < vocabulary, x - log2_noise_of(seed, step, index, 0), -3e38)
            winner = tl.min(tl.where(score == tl.max(score, 0), index, 2147483647), 0)
            tl.store(out + row, winner.to(tl.int64))
        else:
            bound = -1e37
            total = 0.0  # weight of a row without other filters
            if MIN_P:
                bound = tl.where(share > 0, largest + tl.log2(tl.where(share > 0, share, 1.0)), -1e37)
            if greedy:
                k = 1
                p = 1.0
                bound = largest
            elif k <= segments:
                bound = tl.maximum(bound, bound_of_top_k(peaks, largest, k))
            if summed:
                sum_of = tl.load(row_sums + all_segments, mask=there, other=0.0, cache_modifier=".cg")
                weights = tl.where(there, sum_of * tl.exp2(peaks - largest), 0.0)
                total = tl.sum(weights, 0)
                bound = bound_of_top_p(peaks, weights, largest, p, total, SEGMENT)
            reached = (peaks >= bound).to(tl.int32)
            place = tl.cumsum(reached, 0) - 1
            tl.store(row_listed + place, all_segments, mask=reached > 0)
            again = tl.sum(reached, 0)
            tl.debug_barrier()
            row_values, row_tokens = values + row * CANDIDATES, tokens + row * CANDIDATES
            count = 0
            for start in range(0, again, AGAIN):
                number = start + tl.arange(0, AGAIN)
                segment = tl.load(row_listed + number, mask=number < again, other=segments)
                begin = segment // OF_TILE * TILE + segment % OF_TILE * RUN
                index = tl.reshape(begin[:, None] + offset[None, :], [AGAIN * SEGMENT])
                x = load_scaled(row_logits + index, index < vocabulary, scale)
                passed = (x >= bound) & (index < vocabulary)
                slot = count + tl.cumsum(passed.to(tl.int32), 0) - 1
                tl.store(row_values + slot, x, mask=passed & (slot < CANDIDATES))
                tl.store(row_tokens + slot, index, mask=passed & (slot < CANDIDATES))
                count += tl.sum(passed.to(tl.int32), 0)
            tl.debug_barrier()
            if count <= FEW:
                winner = draw_of_few(row_values, row_tokens, count, largest, total, k, p, seed, step, greedy, FEW)
            elif greedy:
                winner = first_largest(row_logits, vocabulary, scale, largest, BLOCK)
            else:
                flat = (count > CANDIDATES).to(tl.int32)
                count = tl.where(flat != 0, vocabulary, count)
                winner = draw(
                    row_values, row_tokens, row_logits, count, scale, flat, bound, largest, total, k, p, seed, step, BLOCK
                )
            tl.store(out + row, winner.to(tl.int64))


@triton.jit(do_not_specialize=["count"])
def penalize_kernel(
    logits, tokens, counts, repetition, frequency, presence, row_stride, tokens_stride, vocabulary, count, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row.to(tl.int64) * tokens_stride + place, mask=place < count, other=-1)
    valid = (token >= 0) & (token < vocabulary)
    times = tl.load(counts + row.to(tl.int64) * tokens_stride + place, mask=valid, other=0).to(tl.float32)
    pointers = logits + row.to(tl.int64) * row_stride + token
    x = tl.load(pointers, mask=valid, other=0.0).to(tl.float32)
    factor = tl.load(repetition + row)
    x = tl.where(x > 0, tl.math.div_rn(x, tl.zeros_like(x) + factor), x * factor)
    x = x - tl.load(frequency + row) * times
    x = x - tl.where(times > 0, tl.load(presence + row), 0.0)
    tl.store(pointers, x.to(logits.dtype.element_ty), mask=valid)


def candidates(arch: int, key: Key) -> list[Config]:
    """`key` is the number of bytes of a logit. Every thread reads 16 bytes of each line. Results do not depend on the
    configuration."""
    if arch == 0:
        return [config(TILES=1, GATHER=1024, BLOCK=1024, FEW=256)]
    warps = 2 * int(key[0])
    return [
        config(warps, TILES=1, GATHER=2048, BLOCK=1024, FEW=256),
        config(warps, TILES=1, GATHER=4096, BLOCK=1024, FEW=256),
        config(warps, TILES=1, GATHER=1024, BLOCK=1024, FEW=128),
        config(warps, TILES=2, GATHER=2048, BLOCK=1024, FEW=256),
        config(warps, TILES=5, GATHER=2048, BLOCK=1024, FEW=256),
    ]


tunable = Tunable("sample", candidates)
PENALIZED = 512  # tokens of a program


def sample_triton(
    logits: Tensor,
    seeds: Tensor,
    steps: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    tokens: Tensor | None,
    counts: Tensor | None,
    repetition: Tensor | None,
    frequency: Tensor | None,
    presence: Tensor | None,
    chosen: dict[str, int] | None = None,
) -> Tensor:
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    if tokens is not None and tokens.numel():
        assert counts is not None and repetition is not None and frequency is not None and presence is not None
        penalize_kernel[(rows, -(-tokens.shape[1] // PENALIZED))](
            logits,
            tokens,
            counts,
            repetition,
            frequency,
            presence,
            logits.stride(0),
            tokens.stride(0),
            vocabulary,
            tokens.shape[1],
            BLOCK=PENALIZED,
            enable_fp_fusion=False,  # rounded after every operation, as torch does
        )
    arguments = chosen or tunable.arguments((logits.element_size(),), logits.device)
    tiles = -(-vocabulary // TILE)
    segments = tiles * (COLUMNS // RUN)
    stats = torch.empty(2, rows, segments, dtype=torch.float32, device=logits.device)
    listed = torch.empty(rows, segments, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=logits.device)
    found = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=logits.device)
    sample_kernel[(-(-tiles // arguments["TILES"]), rows)](
        out,
        stats[0],
        stats[1],
        listed,
        values,
        found,
        stream_arrivals(rows, logits.device),
        logits,
        seeds,
        steps,
        temperature,
        temperature if top_k is None else top_k,
        temperature if top_p is None else top_p,
        temperature if min_p is None else min_p,
        logits.stride(0),
        vocabulary,
        TOP_K=top_k is not None,
        TOP_P=top_p is not None,
        MIN_P=min_p is not None,
        LINES=LINES,
        COLUMNS=COLUMNS,
        RUN=RUN,
        SEGMENTS=max(bucket(segments), 16),
        CANDIDATES=CANDIDATES,
        **arguments,
    )
    return out
