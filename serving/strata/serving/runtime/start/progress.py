"""Deadline and progress lines of an endpoint that starts.

Starting an endpoint is a chain of waits: for Ray Serve, for the engines, for a first answer. Each runs in a thread. The main
thread prints progress, ends at the deadline whatever the wait hangs in, and handles Ctrl-C immediately.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from strata.platform.errors import UserError

T = TypeVar("T")
Report = Callable[[str], None]

LOOK_S = 0.2
REPORT_EVERY_S = 10.0
LINES = 10
LINE_CHARACTERS = 200
DESCRIBE_S = 5.0
DEFAULT_LIMIT_S = {"cpu": 600.0, "gpu": 1800.0}


class StartProgress:
    """Deadline of a start. `logs` returns the engines' logs, the newest last; `describe` which replicas are up."""

    def __init__(self, limit_s: float, report: Report, logs: Callable[[], list[Path]], describe: Callable[[], str]) -> None:
        self._began = time.monotonic()
        self._limit_s, self._report, self._logs, self._describe = limit_s, report, logs, describe
        self._next_line = self._began + REPORT_EVERY_S

    @property
    def left_s(self) -> float:
        return max(0.0, self._began + self._limit_s - time.monotonic())

    def during(self, what: str, work: Callable[[], T]) -> T:
        """Runs `work` and returns its result. Raises UserError at the deadline; the thread then ends with the process."""
        outcome = _in_thread(work)
        while not wait([outcome], timeout=LOOK_S).done:
            now = time.monotonic()
            if not self.left_s:
                raise self._too_late(what)
            if now >= self._next_line:
                self._next_line = now + REPORT_EVERY_S
                last = last_lines(self._logs(), 1)
                self._report(f"{now - self._began:.0f} s: {what}" + (f" · {last[0]}" if last else ""))
        return outcome.result()

    def _too_late(self, what: str) -> UserError:
        described = _in_thread(self._describe)
        state = described.result() if wait([described], timeout=DESCRIBE_S).done and not described.exception() else ""
        return UserError(
            f"The endpoint did not start within {self._limit_s:.0f} s. It was still {what}{state and f': {state}'}."
            f"{shown(self._logs())}",
            "Start it again; if the machine is slow or the model is large, allow more time: serve.start_timeout_s=3600.",
        )


def _in_thread(work: Callable[[], T]) -> "Future[T]":
    """Runs `work` in a daemon thread. The interpreter joins an executor's threads when it ends, and `work` may hang."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again by Future.result
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def last_lines(logs: list[Path], count: int) -> list[str]:
    """The last lines of the newest log that is not empty."""
    for log in reversed(logs):
        try:
            text = log.read_text(errors="replace")
        except FileNotFoundError:  # Ray renames logs when a worker is reused
            continue
        stripped = (line.strip() for line in text.splitlines())
        if lines := [line[:LINE_CHARACTERS] for line in stripped if line and not line.startswith(":")]:  # Ray's own marks
            return lines[-count:]
    return []


def shown(logs: list[Path]) -> str:
    """The end of an engine's log, formatted to follow an error message."""
    lines = last_lines(logs, LINES)
    return "\nThe last lines of an engine's log:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
