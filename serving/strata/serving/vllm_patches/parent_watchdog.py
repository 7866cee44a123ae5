"""Terminates a vLLM engine process when its Ray Serve replica dies.

vLLM's engine is a child process of the replica. It does not notice when the replica dies by SIGKILL: it would wait for requests
forever and hold its memory. vLLM loads this plugin in every process of an engine.

Written for vLLM 0.29. No longer needed when vLLM's engine process ends with its parent; the test of this file fails when vLLM's
engine code checks its parent.
"""

import os
import signal
import threading
import time

REPLICA_PID = "STRATA_REPLICA_PID"  # set by a replica before it starts its engine
PERIOD_S = 0.5


def install() -> None:
    """Starts the watchdog thread. Entry point of the plugin."""
    replica = int(os.environ.get(REPLICA_PID, "0"))
    # Only in children of the replica, or of init: the replica may have died while this process was still importing vLLM.
    if replica and os.getppid() in (replica, 1):
        threading.Thread(target=_watch, args=(replica,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PERIOD_S)
    os.kill(os.getpid(), signal.SIGKILL)
