"""Draws of a token: among candidates that reach the thresholds of top-k and top-p, which it finds, or among all tokens of a row.

Few candidates are compared each with every other; among more, a search finds the exact thresholds. Weights are summed in fp32.
"""

import triton
import triton.language as tl

from strata.kernels.ops.sample.noise import log2_noise_of


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
def above(values, tokens, logits, count, scale, flat, thresholds, largest, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """Number and weight of candidates from each of the thresholds on."""
    found = tl.zeros([WAYS, BLOCK], tl.int32)
    weight = tl.zeros([WAYS, BLOCK], tl.float32)
    for start in range(0, count, 2 * BLOCK):
        for half in tl.static_range(2):  # two blocks are read at once
            x, _ = fetch(values, tokens, logits, start + half * BLOCK, count, scale, flat, BLOCK)
            passed = ordered(x)[None, :] >= thresholds[:, None]
            found += passed.to(tl.int32)
            weight += tl.where(passed, tl.exp2(x - largest)[None, :], 0.0)
    return tl.sum(found, 1), tl.sum(weight, 1)


@triton.jit
def draw(values, tokens, logits, count, scale, flat, bound, largest, total, k, p, seed, step, BLOCK: tl.constexpr):
    """Draws among the candidates from `bound` on: the k largest with their ties, then the fewest largest of these with a share p
    of their weight, again with ties. `total` is the weight of a row without other filters, or 0. Thresholds are searched among
    the ordered keys: a pass over the candidates tries four, and keeps the quarter of the range that holds the exact one."""
    WAYS: tl.constexpr = 4
    way = tl.arange(0, WAYS)
    low = ordered(bound)
    end = ordered(largest) + 1
    high = end
    most = 2147483647
    weight = 0.0
    # Invariant: `most` candidates of this weight from low on, at least k if there were as many; fewer than k from high on.
    while (most > k) & (low + 1 < high):
        keys = (low + (high.to(tl.int64) - low) * way // WAYS).to(tl.int32)
        found, mass = above(values, tokens, logits, count, scale, flat, keys, largest, BLOCK, WAYS)
        enough = (found >= k) | (way == 0)
        low = tl.max(tl.where(enough, keys, low), 0)
        high = tl.min(tl.where(enough, high, keys), 0)
        most = tl.min(tl.where(enough, found, 2147483647), 0)
        weight = tl.min(tl.where(enough, mass, float("inf")), 0)
    if p < 1:
        target = p * tl.where(total > 0, total, weight)
        high = end
        least = 0
        # As above, for weights. One candidate between low and high settles the set.
        while (most - least > 1) & (low + 1 < high):
            keys = (low + (high.to(tl.int64) - low) * way // WAYS).to(tl.int32)
            found, mass = above(values, tokens, logits, count, scale, flat, keys, largest, BLOCK, WAYS)
            enough = (mass >= target) | (way == 0)
            low = tl.max(tl.where(enough, keys, low), 0)
            high = tl.min(tl.where(enough, high, keys), 0)
            most = tl.min(tl.where(enough, found, 2147483647), 0)
            least = tl.max(tl.where(enough, least, found), 0)
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
def draw_of_few(values, tokens, count, largest, total, k, p, seed, step, greedy, FEW: tl.constexpr, AT_ONCE: tl.constexpr):
    """`draw` among at most FEW candidates. One passes top-k if fewer than k are larger, and top-p if the larger ones weigh less
    than the share p."""
    own = tl.arange(0, FEW)
    x = tl.load(values + own, mask=own < count, other=-3e38)
    ids = tl.load(tokens + own, mask=own < count, other=2147483647)
    larger = tl.zeros([FEW], tl.int32)
    mass = tl.zeros([FEW], tl.float32)
    for start in range(0, count, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        y = tl.load(values + other, mask=other < count, other=-3e38)
        weights = tl.exp2(y - largest)
        more = y[:, None] > x[None, :]
        larger += tl.sum(more.to(tl.int32), 0)
        mass += tl.sum(tl.where(more, weights[:, None], 0.0), 0)
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
def tokens_of(segment, LINES: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr):
    """Tokens [segments, tokens of a segment]."""
    inside = tl.arange(0, LINES * RUN)
    first = segment // (COLUMNS // RUN) * (LINES * COLUMNS) + segment % (COLUMNS // RUN) * RUN
    return first[:, None] + (inside // RUN * COLUMNS + inside % RUN)[None, :]


@triton.jit
def draw_of_all(
    logits,
    maxima,
    sums,
    segments,
    seed,
    step,
    scale,
    vocabulary,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Draws a segment by its weight, then a token of it."""
    mass = tl.where(sums > 0, maxima + tl.log2(tl.where(sums > 0, sums, 1.0)), -3e38)
    race = mass - log2_noise_of(seed, step, segments, 1)
    chosen = tl.min(tl.where(race == tl.max(race), segments, 2147483647))
    token = tokens_of(tl.full([1], 0, tl.int32) + chosen, LINES, COLUMNS, RUN)
    x = load_scaled(logits + token, token < vocabulary, scale)
    score = tl.where(token < vocabulary, x - log2_noise_of(seed, step, token, 0), -3e38)
    return tl.min(tl.where(score == tl.max(score), token, 2147483647))
