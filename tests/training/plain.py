"""Schedule, data order and balance loss of a training run, written again in plain Python for comparisons.

Nothing here imports the code that it is compared with. Numbers are Python integers and floats, one at a time.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from strata.platform.recipe import TrainSection

ALL_BITS = 2**64 - 1


def scheduled_rate(step: int, train: TrainSection) -> float:
    """Learning rate of `step`, counted from 0: a ramp of `warmup` steps to the peak, then a decay to the minimum: half a cosine,
    or with `wsd` a constant first half and a straight line."""
    steps, peak, warmup = train.steps, train.lr, train.warmup
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    lowest = peak * train.min_lr_ratio
    if step >= steps and train.schedule != "constant":
        return lowest
    if train.schedule == "constant":
        return peak
    if train.schedule == "linear":
        return lowest + (peak - lowest) * (steps - step) / (steps - warmup)
    if train.schedule == "wsd":
        middle = (warmup + steps) / 2
        return peak if step < middle else lowest + (peak - lowest) * (steps - step) / (steps - middle)
    angle = math.pi * (step - warmup) / (steps - warmup)
    return lowest + (peak - lowest) * (1 + math.cos(angle)) / 2


def scheduled_windows(step: int, batch: int, windows: int, seed: int) -> list[int]:
    """Windows of all sequences of a step, in the order of data-parallel ranks."""
    return [window_at(position, windows, seed) for position in range(step * batch, (step + 1) * batch)]


def window_at(position: int, windows: int, seed: int) -> int:
    """Window at a position of the endless data order. Each epoch is a permutation: a Feistel network of six rounds on the
    smallest power of four that holds all windows, applied until the result is a window."""
    epoch, value = divmod(position, windows)
    keys = [int(key) for key in np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64)]
    root = 2  # the network's domain is root x root
    while root * root < windows:
        root *= 2
    while True:
        left, right = divmod(value, root)
        for key in keys:
            left, right = right, left ^ (splitmix64(right ^ key) % root)
        value = left * root + right
        if value < windows:
            return value


def splitmix64(value: int) -> int:
    """Finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & ALL_BITS
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & ALL_BITS
    return value ^ (value >> 31)


def all_windows(tokens: Path, split: str, context: int) -> list[list[int]]:
    """Every window of a split. Each has one token more than the context, which the next window begins with."""
    meta = json.loads((tokens / "meta.json").read_text())
    windows = []
    for number in range(len(meta["shards"][split])):
        shard = np.fromfile(tokens / f"{split}-{number:05}.bin", meta["dtype"]).tolist()
        windows += [shard[at : at + context + 1] for at in range(0, len(shard) - context, context)]
    return windows


def balance_loss(logits_bte: Tensor, top_k: int) -> Tensor:
    """DeepSeek-V3's sequence-wise balance loss, sequence by sequence and expert by expert."""
    losses = []
    for logits_te in logits_bte:
        tokens, experts = logits_te.shape
        probabilities_te = torch.softmax(logits_te, dim=-1)
        chosen = probabilities_te.detach().argsort(dim=-1, descending=True)[:, :top_k].flatten().tolist()
        terms = [experts * chosen.count(e) / (top_k * tokens) * probabilities_te[:, e].mean() for e in range(experts)]
        losses.append(torch.stack(terms).sum())
    return torch.stack(losses).mean()
