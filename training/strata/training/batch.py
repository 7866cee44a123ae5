"""A micro-batch: what every layout's step takes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Answers:
    """Answers to compare in the rows of a micro-batch, one document each. `document_bt` has the index of each token's document;
    of pairs, 2i is a chosen answer and 2i + 1 the rejected one. `reference_n` has each document's log-probability under the
    reference model, and `desirable_n` its label."""

    document_bt: Tensor
    reference_n: Tensor
    desirable_n: Tensor

    def tensors(self, tokens: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """Fields as arguments of a loss over some tokens of each row."""
        return self.document_bt[:, tokens], self.reference_n, self.desirable_n


@dataclass(frozen=True)
class Pictures:
    """Pictures of a micro-batch from -1 to 1, their noise, and the share of noise of each."""

    pixels_bchw: Tensor
    noise_bchw: Tensor
    times_b: Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of one forward pass on a data-parallel worker, whole, also where sequence-parallel workers take slices of them.

    `positions_bt` restart at 0 with each packed document; None: a row is one document. `count` is the denominator of the loss,
    such that the mean over workers and micro-batches is the mean over the counted targets, pairs or answers of the whole global
    batch, whatever the layout and however they are spread over micro-batches.

    Of pictures, `tokens_bt` are the captions, and `targets_bt` has one column, IGNORED for a row that does not count.
    """

    tokens_bt: Tensor
    targets_bt: Tensor
    positions_bt: Tensor | None
    count: float
    answers: Answers | None = None
    pictures: Pictures | None = None
    distilled: bool = False

    def loss_inputs(self, tokens: slice = slice(None)) -> tuple[Tensor, ...]:
        """Arguments of an objective's loss over some tokens of each row. A teacher takes whole rows."""
        if self.answers:
            return self.answers.tensors(tokens)
        if self.distilled:
            return (self.tokens_bt,) if self.positions_bt is None else (self.tokens_bt, self.positions_bt)
        return ()


def on_device(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Values as a tensor on the device. The host does not wait for a GPU, which is still computing the micro-batch before."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
