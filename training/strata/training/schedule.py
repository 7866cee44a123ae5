"""Learning rate schedule: linear warm-up, then cosine decay to a minimum."""

import math


def learning_rate(step: int, steps: int, peak: float, warmup: int, min_ratio: float) -> float:
    """Learning rate of `step`, counted from 0. A pure function, so checkpoints need no scheduler state."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done)))
