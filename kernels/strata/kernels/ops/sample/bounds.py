"""Lower bounds of the thresholds of top-k and top-p, from the largest logit and the weight of each segment of a row."""

import triton
import triton.language as tl


@triton.jit
def number_from(maxima, threshold):
    return tl.sum((maxima >= threshold).to(tl.int32))


@triton.jit
def bound_of_top_k(maxima, largest, k):
    """A threshold that at least k segments reach, and few more."""
    most = k + tl.minimum(k // 4 + 2, 16)
    low = tl.min(tl.where(maxima > -2e38, maxima, largest))
    near = largest - 200.0  # the steps start here if they can: segments without an allowed token are far below
    if number_from(maxima, near) >= k:
        low = tl.maximum(low, near)
    high = largest
    found = number_from(maxima, low)
    from_low = tl.log2(found.to(tl.float32))
    from_high = 0.0
    aim = tl.log2(tl.cast(k, tl.float32) + 1)
    tries = 0
    # Logarithms of the numbers are about linear in the threshold. Every second step halves, in case they are not.
    while (found > most) & (tries < 32):
        part = tl.where(tries % 2 == 0, (from_low - aim) / tl.maximum(from_low - from_high, 1e-3), 0.5)
        middle = low + (high - low) * tl.minimum(tl.maximum(part, 0.03125), 0.96875)
        reached = number_from(maxima, middle)
        logarithm = tl.log2(tl.maximum(reached, 1).to(tl.float32))
        if reached >= k:
            low = middle
            from_low = logarithm
            found = reached
        else:
            high = middle
            from_high = logarithm
        tries += 1
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
        if tl.sum(below) <= dropped:
            low = middle
        else:
            high = middle
    at_low = tl.sum(tl.where(maxima < low, weights, tl.minimum(weights, SEGMENT * tl.exp2(low - largest))))
    return tl.where(at_low <= dropped, low, -1e37)
