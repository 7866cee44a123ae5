"""Training and validation split by a hash of an example's content."""

import numpy as np
from numpy.typing import NDArray


def held_out(hashes: NDArray[np.uint64], holdout: float) -> NDArray[np.bool_] | None:
    """Examples for validation: the share `holdout`, at least one, and not all. Copies of an example are on the same side of the
    split. None if all are copies of one."""
    values = np.unique(hashes)
    if len(values) < 2:
        return None
    count = int(np.searchsorted(values, np.uint64(int(holdout * 2**64)), side="right"))
    limit: np.uint64 = values[min(max(count, 1), len(values) - 1) - 1]
    return np.asarray(hashes <= limit)
