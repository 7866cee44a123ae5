"""A micro-batch: what every layout's step takes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Pairs of documents in the rows of a micro-batch. `document_bt` has the index of each token's document: 2i is a chosen
    answer, 2i + 1 the rejected one. `reference_n` has each document's log-probability under the reference model."""

    document_bt: Tensor
    reference_n: Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of one forward pass on a data-parallel worker, whole, also where sequence-parallel workers take slices of them.

    `positions_bt` restart at 0 with each packed document; None: a row is one document. `count` is the denominator of the loss,
    such that the mean over workers and micro-batches is the mean over the counted targets, or pairs, of the whole global batch,
    whatever the layout and however they are spread over micro-batches.
    """

    tokens_bt: Tensor
    targets_bt: Tensor
    positions_bt: Tensor | None
    count: float
    pairs: Pairs | None = None
