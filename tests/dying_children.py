"""Child processes of `strata bench serve` that die at their start. In a module that a spawned process can import."""

import os
from typing import Any


def dies_at_once(pipe: Any) -> None:
    os._exit(7)


def dies_before_it_begins(share: Any, barrier: Any, pipe: Any) -> None:
    if share.number == 1:
        os._exit(9)
    barrier.wait(60)  # for the one that is dead
