"""Answers in the rows of a micro-batch, with their labels and the reference model's log-probabilities of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from strata.training.batch import Answers
from strata.training.data.rows import RowBatch
from strata.training.data.sampler import Indices

# Log-probability of each document of some rows under the reference model, in the order of rows and documents.
Reference = Callable[[Indices], Any]


def answers_of(
    rows: RowBatch, indices: Indices, reference: Reference | None, device: torch.device, counts: Any = None
) -> Answers:
    """Answers of rows that were read at `indices`. Rows that do not count, by `counts`, have none."""
    assert rows.positions is not None and rows.documents is not None and rows.labels is not None
    counted = np.ones(len(indices), dtype=bool) if counts is None else np.asarray(counts)
    documents = np.where(counted, np.array(rows.documents, dtype=np.int64), 0)
    within = np.cumsum(rows.positions == 0, axis=1) - 1  # the padding is one more document, of which nothing counts
    last = np.maximum(documents - 1, 0)[:, None]
    first = np.concatenate([[0], np.cumsum(documents)[:-1]])[:, None]
    total = int(documents.sum())
    document_bt = np.minimum(first + np.minimum(within, last), max(0, total - 1))
    values = np.zeros(total, np.float32) if reference is None else np.asarray(reference(indices[counted]), np.float32)
    labels = np.array([label for row in np.flatnonzero(counted) for label in rows.labels[row]], dtype=bool)
    assert len(values) == len(labels) == total, f"{len(values)} reference values, {len(labels)} labels, {total} documents"
    return Answers(*(torch.from_numpy(array).to(device) for array in (document_bt, values, labels)))
