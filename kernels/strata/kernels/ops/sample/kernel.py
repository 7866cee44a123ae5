"""Samples a token of each row in one pass over the logits.

Every program reads a part of a row and stores, for each segment of 256 tokens, the largest logit and the sum of weights. The
program that stores the last part of a row selects its token while others read further rows. Segment maxima bound the thresholds
of top-k and top-p from below: only segments that reach the bound are read again, and tokens that reach it become candidates,
usually a few hundred. Bisection over the candidates finds the exact thresholds. If a flat distribution has more candidates than
fit, the bisection reads the row instead. Weights are summed in fp32.

A row without a filter draws a segment, then a token of it. Nothing depends on the other rows or on the order of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from strata.kernels.ops.arrivals import stream_arrivals
from strata.kernels.ops.sample.noise import log2_noise_of
from strata.kernels.tuning.tunable import Config, Key, Tunable, bucket, config

SEGMENT = 256
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
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,  # of a row, rounded up to a power of two
    CANDIDATES: tl.constexpr,
    SEGMENTS_AT_ONCE: tl.constexpr,
    TILES: tl.constexpr,  # of a program
    STAGES: tl.constexpr,  # of the pipeline that reads logits
    BLOCK: tl.constexpr,  # candidates at once
):
    SEGMENTS_AGAIN: tl.constexpr = BLOCK // SEGMENT
    parts = tl.num_programs(0)
    part, row = tl.program_id(0), tl.program_id(1)
    segments = tl.cdiv(vocabulary, SEGMENT)
    row_logits = logits + row.to(tl.int64) * row_stride
    row_maxima, row_sums, row_listed = maxima + row * segments, sums + row * segments, listed + row * segments
    heat = tl.load(temperature + row)
    greedy = heat < 1e-5
    scale = tl.where(greedy, 1.0, tl.math.div_rn(1.4426950408889634, tl.where(greedy, 1.0, heat)))
    in_segment = tl.arange(0, SEGMENT)
    for tile in tl.range(part * TILES, part * TILES + TILES, num_stages=STAGES):
        segment = tile * SEGMENTS_AT_ONCE + tl.arange(0, SEGMENTS_AT_ONCE)
        index = segment[:, None] * SEGMENT + in_segment[None, :]
        x = load_scaled(row_logits + index, index < vocabulary, scale)
        peak = tl.max(x, 1)
        tl.store(row_maxima + segment, peak, mask=segment < segments)
        tl.store(row_sums + segment, tl.sum(tl.exp2(x - peak[:, None]), 1), mask=segment < segments)

    tl.debug_barrier()  # all threads have stored before the arrival is counted
    before = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
    if before == parts - 1:
        tl.store(arrivals + row, 0)  # reset for the next launch
        all_segments = tl.arange(0, SEGMENTS)
        there = all_segments < segments
        # Loads bypass L1, which may be stale.
        peaks = tl.load(row_maxima + all_segments, mask=there, other=-3e38, cache_modifier=".cg")
        sum_of = tl.load(row_sums + all_segments, mask=there, other=0.0, cache_modifier=".cg")
        largest = tl.max(peaks, 0)
        weights = sum_of * tl.exp2(peaks - largest)
        total = tl.sum(weights, 0)
        seed = tl.load(seeds + row)
        step = tl.load(steps + row).to(tl.int32)
        k = vocabulary
        p = 1.0
        floor = -1e37
        if TOP_K:
            given_k = tl.load(top_k + row).to(tl.int32)
            k = tl.where((given_k > 0) & (given_k < vocabulary), given_k, vocabulary)
        if TOP_P:
            p = tl.load(top_p + row)
        if MIN_P:
            share = tl.load(min_p + row)
            floor = tl.where(share > 0, largest + tl.log2(tl.where(share > 0, share, 1.0)), -1e37)
        filtered = (k < vocabulary) | (p < 1) | (floor > -1e37)
        if greedy | (filtered == 0):
            if greedy:
                chosen = tl.min(tl.where(peaks == largest, all_segments, SEGMENTS), 0)
            else:
                mass = tl.where(there, peaks + tl.log2(tl.where(there, sum_of, 1.0)), -3e38)
                race = mass - log2_noise_of(seed, step, all_segments, 1)
                chosen = tl.min(tl.where(race == tl.max(race, 0), all_segments, SEGMENTS), 0)
            index = chosen * SEGMENT + in_segment
            x = tl.where(index < vocabulary, load_scaled(row_logits + index, index < vocabulary, scale), -3e38)
            score = tl.where(greedy, x, x - log2_noise_of(seed, step, index, 0))
            winner = tl.min(tl.where(score == tl.max(score, 0), index, 2147483647), 0)
            tl.store(out + row, winner.to(tl.int64))
        else:
            bound = floor
            alone = 0.0
            if k <= segments:
                bound = tl.maximum(bound, bound_of_top_k(peaks, largest, k))
            if (k == vocabulary) & (floor <= -1e37):
                alone = total
                bound = bound_of_top_p(peaks, weights, largest, p, total, SEGMENT)
            reached = (peaks >= bound).to(tl.int32)
            place = tl.cumsum(reached, 0) - 1
            tl.store(row_listed + place, all_segments, mask=reached > 0)
            again = tl.sum(reached, 0)
            tl.debug_barrier()
            row_values, row_tokens = values + row * CANDIDATES, tokens + row * CANDIDATES
            count = 0
            for start in range(0, again, SEGMENTS_AGAIN):
                number = start + tl.arange(0, SEGMENTS_AGAIN)
                segment = tl.load(row_listed + number, mask=number < again, other=segments)
                index = tl.reshape(segment[:, None] * SEGMENT + in_segment[None, :], [SEGMENTS_AGAIN * SEGMENT])
                x = load_scaled(row_logits + index, index < vocabulary, scale)
                passed = (x >= bound) & (index < vocabulary)
                slot = count + tl.cumsum(passed.to(tl.int32), 0) - 1
                tl.store(row_values + slot, x, mask=passed & (slot < CANDIDATES))
                tl.store(row_tokens + slot, index, mask=passed & (slot < CANDIDATES))
                count += tl.sum(passed.to(tl.int32), 0)
            tl.debug_barrier()
            flat = (count > CANDIDATES).to(tl.int32)
            count = tl.where(flat != 0, vocabulary, count)
            winner = draw(row_values, row_tokens, row_logits, count, scale, flat, bound, largest, alone, k, p, seed, step, BLOCK)
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
    """`key` is the number of bytes of a logit. Results do not depend on the configuration."""
    if arch == 0:
        return [config(SEGMENTS_AT_ONCE=4, TILES=2, STAGES=1, BLOCK=1024)]
    return [
        config(8, SEGMENTS_AT_ONCE=16, TILES=10, STAGES=3, BLOCK=1024),
        config(8, SEGMENTS_AT_ONCE=16, TILES=5, STAGES=3, BLOCK=1024),
        config(8, SEGMENTS_AT_ONCE=16, TILES=5, STAGES=1, BLOCK=1024),
        config(8, SEGMENTS_AT_ONCE=32, TILES=5, STAGES=1, BLOCK=1024),
        config(8, SEGMENTS_AT_ONCE=16, TILES=19, STAGES=4, BLOCK=1024),
        config(4, SEGMENTS_AT_ONCE=8, TILES=10, STAGES=3, BLOCK=512),
        config(4, SEGMENTS_AT_ONCE=8, TILES=10, STAGES=1, BLOCK=512),
        config(4, SEGMENTS_AT_ONCE=16, TILES=10, STAGES=2, BLOCK=512),
        config(4, SEGMENTS_AT_ONCE=8, TILES=19, STAGES=4, BLOCK=512),
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
    segments = -(-vocabulary // SEGMENT)
    stats = torch.empty(2, rows, segments, dtype=torch.float32, device=logits.device)
    listed = torch.empty(rows, segments, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=logits.device)
    found = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=logits.device)
    parts = -(-segments // (arguments["SEGMENTS_AT_ONCE"] * arguments["TILES"]))
    sample_kernel[(parts, rows)](
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
        SEGMENT=SEGMENT,
        SEGMENTS=max(bucket(segments), 16),
        CANDIDATES=CANDIDATES,
        **arguments,
    )
    return out
