"""Rotary position embedding: frequencies, with the rescaling kinds of long-context models, and tables of a batch's positions.

Frequencies are computed per forward pass: an engine that casts a model to bf16 would cast a stored buffer too.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from strata.platform.recipe import ModelSection, RopeScalingSection


class Positions(NamedTuple):
    """Positions of a batch's tokens, as a layer needs them: rotary angles as (cosine, sine) of [t, e / 2], or [b x t, e / 2] for
    packed documents, and the documents' bounds (`cu_seqlens`, int32) over all rows of the batch. Without bounds, each row is one
    document. Sliding layers may rotate by other frequencies."""

    full: tuple[Tensor, Tensor]
    sliding: tuple[Tensor, Tensor]
    bounds: Tensor | None


def positions(section: ModelSection, positions_t: Tensor, bounds: Tensor | None = None) -> Positions:
    """`positions_t` [t] counts from the start of a row, which is then one document. [b, t] restarts at 0 with each of a row's
    documents; their bounds are derived unless given, for rows that are parts of longer ones."""
    if positions_t.dim() == 2 and bounds is None:
        bounds = document_bounds(positions_t)
    theta = section.architecture.sliding_rope_theta
    full = rotary_table(positions_t, *frequencies(section, positions_t.device))
    sliding = full if theta is None else rotary_table(positions_t, _unscaled(theta, section.head_dim, positions_t.device), 1.0)
    return Positions(full, sliding, bounds)


def document_bounds(positions_bt: Tensor) -> Tensor:
    """Start of each document in the flattened batch, and the end of the last, as int32."""
    starts = (positions_bt.flatten() == 0).nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([positions_bt.numel()])]).int()


def rotary_table(positions_t: Tensor, frequencies_e: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    angles_te = torch.outer(positions_t.flatten().float(), frequencies_e)
    cos_te, sin_te = angles_te.cos(), angles_te.sin()
    return (cos_te, sin_te) if factor == 1.0 else (cos_te * factor, sin_te * factor)


def frequencies(section: ModelSection, device: torch.device) -> tuple[Tensor, float]:
    """Frequency of each pair of dimensions, and the factor of the rotated queries and keys."""
    plain = _unscaled(section.rope_theta, section.head_dim, device)
    scaling = section.architecture.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    assert scaling.original_context
    if scaling.kind == "llama3":
        return _llama3(plain, scaling, scaling.original_context), 1.0
    factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention_factor is None else scaling.attention_factor
    return _yarn(plain, scaling, scaling.original_context, section.rope_theta, section.head_dim), factor


def _unscaled(theta: float, head_dim: int, device: torch.device) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)


def _llama3(plain: Tensor, scaling: RopeScalingSection, original: int) -> Tensor:
    """Divides long wavelengths by the factor and leaves short ones; those between are interpolated."""
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / scaling.factor + share * plain


def _yarn(plain: Tensor, scaling: RopeScalingSection, original: int, theta: float, head_dim: int) -> Tensor:
    """Divides frequencies of few rotations in the original context by the factor and leaves those of many ("NTK by parts")."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    share = ((torch.arange(head_dim // 2, device=plain.device, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling.factor * share + plain * (1 - share)
