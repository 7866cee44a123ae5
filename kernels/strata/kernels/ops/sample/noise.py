"""Exponential noise of the draw, from Philox: in torch, and in Triton for the kernel.

The noise of a token depends on the row's seed, the step and the token alone. A draw takes the largest log2 weight - log2 noise,
which selects each token with its probability (an exponential race, or Gumbel-max).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
LOW = 2**32 - 1
TOKENS, SEGMENTS = 0, 1  # streams of random numbers
SMALL = 0.01  # below, 1 - u would lose the digits that decide


def philox(seeds: Tensor, c0: Tensor, c1: Tensor, stream: int) -> Tensor:
    """The first 32 bits of Philox4x32-10 with counter (c0, c1, stream, 0) and 64-bit keys `seeds`, all int64."""
    keys = [seeds & LOW, (seeds >> 32) & LOW]
    counter = [c0 & LOW, c1 & LOW, torch.full_like(c0, stream), torch.zeros_like(c0)]
    for _ in range(ROUNDS):
        first, second = counter[0] * MULTIPLIERS[0], counter[2] * MULTIPLIERS[1]  # modulo 2**64
        counter = [
            (second >> 32) & LOW ^ counter[1] ^ keys[0],
            second & LOW,
            (first >> 32) & LOW ^ counter[3] ^ keys[1],
            first & LOW,
        ]
        keys = [(key + step) & LOW for key, step in zip(keys, KEY_STEPS, strict=True)]
    return counter[0]


def log2_noise(seeds: Tensor, steps: Tensor, index: Tensor, stream: int) -> Tensor:
    """log2 of exponential noise [rows, n] in fp32, for seeds and steps [rows] and an index [n] or [rows, n] of tokens."""
    index = index.expand(seeds.shape[0], -1)
    bits = philox(seeds[:, None], index, steps[:, None].expand_as(index), stream)
    u = (bits.float() + 0.5) * 2**-32
    return torch.log2(torch.where(u < SMALL, u * (1 + u * (1 / 2 + u * (1 / 3 + u / 4))), -torch.log(1 - u)))


@triton.jit
def log2_noise_of(seed, step, index, STREAM: tl.constexpr):
    """`log2_noise` of one row in a kernel."""
    zero = index * 0
    bits, _, _, _ = tl.philox(seed, index, zero + step, zero + STREAM, zero)
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    small = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.log2(tl.where(u < 0.01, small, -tl.log(1 - u)))
