"""Entry points of `strata bench serve` child processes that exit at start, in a module that spawned processes can import."""

import os
from typing import Any


def exits_at_start(pipe: Any) -> None:
    os._exit(7)


def second_client_exits_at_start(share: Any, barrier: Any, pipe: Any) -> None:
    if share.number == 1:
        os._exit(9)
    barrier.wait(60)  # blocks: the second client never arrives
