"""Waiting for Ctrl-C or SIGTERM."""

import time


def wait_for_interrupt() -> None:
    """Until a signal's handler raises. `signal.pause` would sleep for ever after a signal that came just before it."""
    while True:
        time.sleep(0.5)
