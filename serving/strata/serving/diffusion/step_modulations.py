"""Scales and shifts of adaptive norms, computed for all steps of a sampling call at once.

Every adaptive norm projects an embedding of the time and the pooled text, one row per picture. These projections hold a quarter
of FLUX's weights: a step alone would read them all for one row.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from diffusers.models.normalization import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    SD35AdaLayerNormZeroX,
)
from torch import Tensor, nn

ADAPTIVE = (AdaLayerNormContinuous, AdaLayerNormZero, AdaLayerNormZeroSingle, SD35AdaLayerNormZeroX)


class Projection(nn.Module):
    """Takes the place of a norm's `linear`. `current` is this step's result, if it was prepared."""

    current: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("current", None, persistent=False)

    def forward(self, embedding: Tensor) -> Tensor:
        return self.linear(embedding) if self.current is None else self.current


class StepModulations:
    """All projections of a model. The results of a step have the same addresses in every step, so CUDA graphs can read them."""

    def __init__(self, model: nn.Module) -> None:
        self._projections: list[Projection] = []
        for norm in _adaptive_norms(model):
            norm.linear = Projection(norm.linear)  # type: ignore[arg-type]
            self._projections.append(norm.linear)
        ends = torch.tensor([0] + [one.linear.out_features for one in self._projections]).cumsum(0).tolist()
        self._columns = [slice(*pair) for pair in pairwise(ends)]
        self._current: dict[int, Tensor] = {}  # by number of rows

    def __bool__(self) -> bool:
        return bool(self._projections)

    def prepare(self, embeddings: Tensor) -> None:
        """`embeddings` are [steps, rows, width]."""
        active = torch.nn.functional.silu(embeddings)
        self._steps = torch.cat([one.linear(active) for one in self._projections], dim=-1)
        rows = embeddings.shape[1]
        if rows not in self._current:
            self._current[rows] = torch.empty_like(self._steps[0])
        self._selected = self._current[rows]
        for one, columns in zip(self._projections, self._columns, strict=True):
            one.current = self._selected[:, columns]

    def select(self, step: int) -> None:
        self._selected.copy_(self._steps[step])

    def clear(self) -> None:
        for one in self._projections:
            one.current = None


def _adaptive_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Those that take the embedding. DiT's norms embed the time themselves."""
    for module in model.modules():
        if isinstance(module, ADAPTIVE) and getattr(module, "emb", None) is None:
            yield module
