"""Cache of the reference model's log-probabilities, one number for each document of a data set.

The reference model does not change during training, so its pass over the data is done once and found again by later runs. A cache
is a folder named after everything that determines its numbers. It holds parts, each a file with the numbers of some rows. A part
is written atomically and its name is the digest of its content, so that a killed computation continues after the last part, ranks
write into the same folder without locks, and a damaged part is detected and computed again.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.recipe import Precision

FORMAT = 1  # increased when the same key would have different files
ENTRY = np.dtype([("row", "<i8"), ("logp", "<f4")])
SUFFIX = ".part"

Rows = Sequence[int] | npt.NDArray[np.int64]


def cache_key(rows_digest: str, weights_digest: str, context: int, precision: Precision) -> str:
    """Name of a cache: digest of the data rows, the reference weights, and the settings that change the model's numbers."""
    key = json.dumps([FORMAT, rows_digest, weights_digest, context, precision])
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


class ReferenceCache:
    """Cached numbers of `documents` rows, in `folder`/`key`.

    Each call of `put` writes a file: a caller that computes few rows at a time should collect some thousands first.
    """

    def __init__(self, folder: Path, key: str, documents: int) -> None:
        self.folder = folder / key
        self.documents = documents
        self._parts: dict[str, npt.NDArray[np.void]] = {}
        self._values: npt.NDArray[np.float32] = np.full(documents, np.nan, np.float32)

    def missing(self) -> npt.NDArray[np.int64]:
        """Rows without a number, in order. Finds the parts that other processes have written by now."""
        self._refresh()
        return np.flatnonzero(np.isnan(self._values))

    def put(self, rows: Rows, values: Sequence[float] | npt.NDArray[np.floating]) -> None:
        """Stores the numbers of some rows. They are on disk when this returns."""
        chosen = np.asarray(rows, np.int64)
        with np.errstate(over="ignore"):  # becomes infinite, which is refused below
            numbers = np.asarray(values, np.float32)
        if chosen.ndim != 1 or chosen.shape != numbers.shape:
            raise ValueError(f"expected one value for each row, got {list(chosen.shape)} rows and {list(numbers.shape)} values")
        self._require_known(chosen)
        if len(np.unique(chosen)) != len(chosen):
            raise ValueError("a row occurs more than once")
        if not np.isfinite(numbers).all():
            row = int(chosen[~np.isfinite(numbers)][0])
            raise UserError(
                f"The reference model's log-probability of row {row} is not a finite number.",
                "Check that the reference model's folder holds trained weights, or use train.precision=fp32.",
            )
        if len(chosen) == 0:
            return
        part = np.empty(len(chosen), ENTRY)
        part["row"], part["logp"] = chosen, numbers
        write_atomic(self.folder / f"{_digest(part.tobytes())}{SUFFIX}", part.tobytes())

    def read(self, rows: Rows) -> npt.NDArray[np.float32]:
        """Numbers of some rows, in their order. All must be present."""
        chosen = np.asarray(rows, np.int64)
        self._require_known(chosen)
        if np.isnan(self._values[chosen]).any():
            self._refresh()
        found = self._values[chosen]
        if np.isnan(found).any():
            raise ValueError(
                f"row {chosen[np.isnan(found)][0]} has not been computed: {np.isnan(found).sum()} of these are missing"
            )
        return found

    def _refresh(self) -> None:
        """Loads new parts. If two have the same row, the part first by name decides, on every rank and in every run."""
        names = {path.name for path in self.folder.glob(f"*{SUFFIX}")}
        if names == self._parts.keys():
            return
        ordered = sorted(names, reverse=True)
        loaded = {name: self._parts[name] if name in self._parts else _load(self.folder / name) for name in ordered}
        self._parts = {name: part for name, part in loaded.items() if part is not None}
        self._values = np.full(self.documents, np.nan, np.float32)
        for part in self._parts.values():
            self._require_known(part["row"])
            self._values[part["row"]] = part["logp"]

    def _require_known(self, rows: npt.NDArray[np.int64]) -> None:
        wrong = rows[(rows < 0) | (rows >= self.documents)]
        if len(wrong):
            raise ValueError(f"row {wrong[0]} is not one of the {self.documents} documents")


def _load(path: Path) -> npt.NDArray[np.void] | None:
    """Entries of a part. A damaged part is deleted, so that its rows are missing again."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:  # another process found it damaged
        return None
    if path.name != f"{_digest(content)}{SUFFIX}":
        path.unlink(missing_ok=True)
        return None
    return np.frombuffer(content, ENTRY)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
