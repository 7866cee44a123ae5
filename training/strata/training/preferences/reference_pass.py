"""Log-probabilities of all documents under the reference model, which is the model that a run starts from.

They are computed once, in the run's own layout, and cached: a killed pass continues, and a resumed run or another run on the same
data and model finds them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from strata.platform.files import cache_dir
from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.training.data.finetuning.rows import Rows
from strata.training.data.sampler import Indices
from strata.training.data.shards import SPLITS, Split
from strata.training.layout import place
from strata.training.preferences.kl import kl_estimate, kl_sums
from strata.training.preferences.mismatched import MismatchedRows
from strata.training.preferences.reference import ReferenceCache, cache_key

ROWS_OF_A_PART = 512  # for each data-parallel worker


class Evaluator(Protocol):
    """Worker that runs forward passes over rows in its layout."""

    engine: Any

    def logprobs(
        self, rows: Rows, indices: Indices, progress: Callable[[int], None] = lambda _: None
    ) -> tuple[list[Tensor], Indices]:
        """Returns log-probabilities of documents, and the rows of this data-parallel worker that have these documents. `progress`
        receives the rows done so far, of all workers."""
        ...


class ReferenceValues:
    """Cached numbers of a split's documents."""

    def __init__(self, rows: Rows, split: str, weights: str, model: ModelSection, train: TrainSection) -> None:
        self.rows, self.split = rows, split
        key = cache_key(f"{rows.meta.digest}-{split}", weights, model.context, train.precision)
        self._cache = ReferenceCache(cache_dir() / "reference", key, rows.document_count())

    def of(self, indices: Indices) -> NDArray[np.float32]:
        return self._cache.read(self.rows.documents(indices))

    def missing_rows(self) -> Indices:
        """Rows with a document that has no number. Rank 0 looks, and all ranks return the same."""
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            without = np.zeros(self.rows.document_count(), dtype=bool)
            without[self._cache.missing()] = True
            found = [np.array([i for i in range(len(self.rows)) if without[self.rows.documents(np.array([i]))].any()], np.int64)]
        dist.broadcast_object_list(found, 0)
        missing: Indices = found[0]
        return missing

    def complete(
        self, missing: Indices, worker: Evaluator, parallel: ParallelSection, progress: Callable[[int, int], None]
    ) -> None:
        """Computes numbers. Called by all ranks, with the reference's weights in the engine. `progress` receives the rows done so
        far, and all of them."""
        here = place(dist.get_rank(), parallel)
        size = ROWS_OF_A_PART * parallel.data
        for begin in range(0, len(missing), size):

            def counted(done: int, before: int = begin) -> None:
                progress(before + done, len(missing))

            found, mine = worker.logprobs(self.rows, missing[begin : begin + size], counted)
            if found and here.tensor == 0 and here.sequence == 0:  # a rank with an output layer
                self._cache.put(self.rows.documents(mine), torch.cat(found).float().cpu().numpy())
        dist.barrier()


class ReferenceModel:
    """Log-probabilities of a run's answers and, for KTO, of its mismatched answers, by split."""

    def __init__(self, tokens: Path, weights: str, model: ModelSection, train: TrainSection) -> None:
        assert train.preference
        self.values = {split: ReferenceValues(Rows(tokens, split), split, weights, model, train) for split in SPLITS}
        self._mismatched = {
            split: ReferenceValues(MismatchedRows(tokens, split), f"{split}-mismatched", weights, model, train)
            for split in SPLITS
            if train.preference.loss == "kto"
        }

    def missing_rows(self) -> list[tuple[ReferenceValues, Indices]]:
        """Rows to compute, on all ranks the same."""
        found = [(values, values.missing_rows()) for values in (*self.values.values(), *self._mismatched.values())]
        return [(values, rows) for values, rows in found if len(rows)]

    def kl(self, split: Split, indices: Indices, worker: Evaluator) -> Tensor | None:
        """KTO's reference point for some rows of a split; None for other losses. Called by all ranks, with the same rows."""
        if split not in self._mismatched:
            return None
        values, device = self._mismatched[split], worker.engine.device
        found, mine = worker.logprobs(values.rows, indices)
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        if found:  # on each rank of a tensor- or sequence-parallel group the same, which a ratio of sums does not see
            sums += kl_sums(torch.cat(found), torch.from_numpy(values.of(mine)).to(device))
        dist.all_reduce(sums)
        return kl_estimate(sums)
