"""Utilization of a GPU by a matrix product."""

TILE = (128, 256)  # what one multiprocessor works on at a time, in the large products of cuBLAS
MULTIPROCESSORS = 132  # H100; A100 has 108, B200 148
PROLOGUE = 128  # columns' worth of time that a tile takes to start, and to write its result


def filled(rows: float, columns: float, inner: float) -> float:
    """The share of a GPU's matrix rate that a product [rows, inner] x [inner, columns] gets: the last wave of tiles leaves half
    of the multiprocessors idle on average, and a tile with little to sum over does not pay for its start."""
    tiles = max(1.0, rows / TILE[0]) * max(1.0, columns / TILE[1])
    return tiles / (tiles + MULTIPROCESSORS / 2) * inner / (inner + PROLOGUE)
