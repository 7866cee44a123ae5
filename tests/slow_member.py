"""A rank of `strata bench fabric` that is slower than the others, for its test. Spawned processes import it by name."""

import time
from typing import Any

from strata.training.bench.fabric.member import Member

SLOW_RANK = 2
DELAY_S = 0.01  # far more than a collective of the test needs


class SlowMember(Member):
    def reduce(self, buffer: Any, group: Any) -> None:
        super().reduce(buffer, group)
        if self.rank == SLOW_RANK and buffer.numel() > 1:
            time.sleep(DELAY_S)
