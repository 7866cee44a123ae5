"""Early stop: a run ends when its validation loss has not fallen for a number of evaluations."""

from collections.abc import Iterable
from dataclasses import dataclass

from strata.training.metrics.records import Record


@dataclass
class EarlyStop:
    """Best validation loss so far, and the evaluations since. All ranks see the same losses, so all decide alike."""

    patience: int | None
    best: float = float("inf")
    since: int = 0

    @classmethod
    def after(cls, patience: int | None, history: Iterable[Record]) -> "EarlyStop":
        """State of a resumed run, from its records."""
        state = cls(patience)
        for record in history:
            if "val_loss" in record:
                state.seen(record["val_loss"])
        return state

    def seen(self, val_loss: float) -> bool:
        """Counts an evaluation. Returns whether the run should end."""
        self.since = 0 if val_loss < self.best else self.since + 1
        self.best = min(self.best, val_loss)
        return self.patience is not None and self.since >= self.patience
