"""Faults of one node's workers. Python imports this module first in every process whose PYTHONPATH has its folder.

`STRATA_PLANTED` is the fault, and `STRATA_PLANTED_AT` a file, from whose existence on the workers have the fault.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

FLAG, FAULT = Path(os.environ["STRATA_PLANTED_AT"]), os.environ["STRATA_PLANTED"]
SLOW_S = 0.2


def flip_a_bit(module: Any) -> None:
    begin = module.Comparison.begin

    def begin_with_a_fault(self: Any, step: int) -> None:
        begin(self, step)
        if FLAG.exists():
            self._trained[2].data.view(-1)[:1].view(module.torch.int32).bitwise_xor_(1 << 20)

    module.Comparison.begin = begin_with_a_fault


def read_slowly(module: Any) -> None:
    read = module.WindowRows.read

    def slow_read(self: Any, indices: Any) -> Any:
        if FLAG.exists():
            time.sleep(SLOW_S)
        return read(self, indices)

    module.WindowRows.read = slow_read


PATCHES = {
    "bit": ("strata.training.watchdog.replicas", "Comparison", flip_a_bit),
    "slow": ("strata.training.data.windows", "WindowRows", read_slowly),
}


def patch_after_import() -> None:
    name, attribute, patch = PATCHES[FAULT]
    while not hasattr(sys.modules.get(name), attribute):
        time.sleep(0.01)
    time.sleep(0.2)  # for the rest of the module
    patch(sys.modules[name])


threading.Thread(target=patch_after_import, daemon=True).start()
