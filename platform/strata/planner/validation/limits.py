"""Error limits of `strata plan validate`, from `published/limits.json`.

The limits are data, apart from the code that they judge: no change of a formula can move its own limit.
"""

import json
from dataclasses import dataclass
from pathlib import Path

LIMITS = Path(__file__).parent / "published" / "limits.json"


@dataclass(frozen=True)
class Limits:
    """Largest mean and worst error of a check. None: no limit."""

    mean: float | None = None
    worst: float | None = None


def limits_of(check: str) -> Limits:
    """Limits of a check. A check without an entry is an error, since it would pass with any figures."""
    return Limits(**json.loads(LIMITS.read_text())[check])
