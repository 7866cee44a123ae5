"""The learning rate of a step: linear warm-up, then half a cosine down to its floor."""

import math


def learning_rate(step: int, steps: int, peak: float, warmup: int, min_ratio: float) -> float:
    """`step` counts from 0; a pure function of it, so there is no scheduler state to save."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done)))
