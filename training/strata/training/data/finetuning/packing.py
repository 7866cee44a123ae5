"""Best-fit packing of documents into rows of equal length.

Documents go into rows in decreasing order of length, each into the row in which it leaves the least space (Ding et al., "Fewer
truncations improve language modeling"). The result depends on the lengths alone.
"""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def pack(lengths: Indices, context: int) -> tuple[Indices, Indices]:
    """Rows as (order, offsets): row r has the documents order[offsets[r]:offsets[r + 1]]."""
    assert not lengths.size or (lengths.min() > 0 and lengths.max() <= context)
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # rows by the tokens that still fit
    spaces = 0  # bit n is set if a row has space for exactly n more tokens
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        if enough := spaces >> length:
            space = length + (enough & -enough).bit_length() - 1  # the lowest set bit is the tightest row
            row = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, row = context, len(rows)
            rows.append([])
        rows[row].append(document)
        if left := space - length:
            by_space.setdefault(left, []).append(row)
            spaces |= 1 << left
    order = np.array([document for row in rows for document in row], np.int64)
    return order, np.cumsum([0, *map(len, rows)], dtype=np.int64)


def one_each(count: int) -> tuple[Indices, Indices]:
    """Rows with one document each, in order."""
    return np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64)
