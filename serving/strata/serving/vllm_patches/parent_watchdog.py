"""An engine that ends with its replica.

vLLM's engine is a child process of the replica's. Nothing tells it when the replica dies by SIGKILL: it would wait for
requests forever, with its memory. vLLM loads this plugin into every process of an engine, so it is the place to look.
"""

import os
import signal
import threading
import time

REPLICA_PID = "STRATA_REPLICA_PID"  # set by a replica before it starts its engine
PERIOD_S = 0.5


def share() -> None:
    replica = int(os.environ.get(REPLICA_PID, "0"))
    # The replica's own children; or a child of init, if the replica died while this process was still importing vLLM.
    if replica and os.getppid() in (replica, 1):
        threading.Thread(target=_end_with, args=(replica,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PERIOD_S)
    os.kill(os.getpid(), signal.SIGKILL)
