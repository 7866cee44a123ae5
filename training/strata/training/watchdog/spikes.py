"""Rule for a step whose loss or gradient norm is not finite, or a spike: back to the newest checkpoint, and on without its batch.

The batch is replaced by one from behind the run's end. Batches that are left out are in a file of the run, so the workers find
them after a restart, and a resumed run does too.
"""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from strata.platform.files import write_atomic
from strata.platform.recipe import SpikeSection
from strata.training.metrics.records import Record

RECENT = 50  # steps whose median is the measure
LEAST = 10  # steps before a finite value can be a spike: the first losses fall fast
MOST_DOCUMENTS = 20


class BatchLeftOut(Exception):
    """Raised on all ranks. Ray then restarts the workers from the newest checkpoint."""

    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A batch that is not trained on, counted from 0 as in the data order, and the one in its place."""

    step: int
    instead: int
    reason: str
    documents: tuple[str, ...]  # of the rank with the worst loss

    def sentence(self) -> str:
        return f"{self.reason} The batch is left out. Its documents: {'; '.join(self.documents)}."


def path(run: Path) -> Path:
    return run / "left_out_batches.json"


def read(run: Path) -> list[LeftOut]:
    try:
        raw = json.loads(path(run).read_text())
    except FileNotFoundError:
        return []
    return [LeftOut(**one | {"documents": tuple(one["documents"])}) for one in raw]


def write(run: Path, batches: Sequence[LeftOut]) -> None:
    write_atomic(path(run), json.dumps([asdict(one) for one in batches], indent=1))


class Spikes:
    """Loss and gradient norm of the last steps."""

    def __init__(self, section: SpikeSection | None) -> None:
        self._section = section
        self._recent: dict[str, deque[float]] = {"loss": deque(maxlen=RECENT), "gradient norm": deque(maxlen=RECENT)}

    def seen(self, record: Record) -> str | None:
        """A sentence if the step of this record is a spike by the rule, which does not enter the measure then."""
        if self._section is None:
            return None
        values = {"loss": record["loss"], "gradient norm": record["grad_norm"]}
        for name, value in values.items():
            if value is None:
                continue
            recent = self._recent[name]
            if not math.isfinite(value):
                return f"The {name} is {value} at step {record['step']}."
            if len(recent) >= LEAST and value > self._section.factor * median(recent):
                times = value / median(recent)
                return f"The {name} is {value:.4g} at step {record['step']}, {times:.1f} times the median of {len(recent)} steps."
        for name, value in values.items():
            if value is not None:
                self._recent[name].append(value)
        return None
