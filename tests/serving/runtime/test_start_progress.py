"""Waits during the start: progress lines, timeouts and Ctrl-C."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from strata.platform.errors import UserError
from strata.serving.runtime.start import progress as start_progress
from strata.serving.runtime.start.progress import StartProgress, last_lines


def progress(limit_s: float, printed: list[str], logs: list[Path], describe: Callable[[], str] = lambda: "") -> StartProgress:
    return StartProgress(limit_s, printed.append, lambda: logs, describe)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "worker-1.err"
    file.write_text(":job_id:01000000\nloading the weights\n\nwaiting for a port\n")
    return file


def test_wait_returns_the_result_or_raises_the_error() -> None:
    start = progress(60, [], [])
    assert start.during("waiting", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        start.during("waiting", lambda: 1 // 0)
    with pytest.raises(TimeoutError):  # raised by the work, not mistaken for the wait's own
        start.during("waiting", _time_out)


def _time_out() -> None:
    raise TimeoutError


def test_timeout_shows_the_last_log_lines_and_the_fix(log: Path) -> None:
    start = progress(0.3, [], [log], lambda: "0 of 1 prefill, 1 of 1 decode up")
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        start.during("waiting for the engines", threading.Event().wait)
    assert time.monotonic() - began < 5
    assert "still waiting for the engines: 0 of 1 prefill, 1 of 1 decode up." in error.value.cause
    assert error.value.cause.endswith("  loading the weights\n  waiting for a port")
    assert "serve.start_timeout_s" in error.value.fix


@pytest.mark.parametrize("describe", [lambda: threading.Event().wait() and "", lambda: str(1 // 0)])
def test_unknown_state_is_omitted(monkeypatch: pytest.MonkeyPatch, describe: Callable[[], str]) -> None:
    """Serve's controller may be the process that hangs."""
    monkeypatch.setattr(start_progress, "DESCRIBE_S", 0.1)
    with pytest.raises(UserError, match=r"still waiting\.$|still waiting\.\n"):
        progress(0.1, [], [], describe).during("waiting", threading.Event().wait)


@pytest.mark.slow
def test_progress_lines_name_the_wait(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    monkeypatch.setattr(start_progress, "REPORT_EVERY_S", 0.3)
    printed: list[str] = []
    progress(60, printed, [log]).during("waiting for the engines", lambda: time.sleep(1.5))
    assert 2 <= len(printed) <= 5
    assert printed[0].endswith(" s: waiting for the engines · waiting for a port")


def test_ctrl_c_ends_a_wait() -> None:
    threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        progress(60, [], []).during("waiting", threading.Event().wait)


def test_last_lines_come_from_the_newest_non_empty_log(tmp_path: Path, log: Path) -> None:
    silent, gone = tmp_path / "worker-2.err", tmp_path / "worker-3.err"
    silent.write_text(":actor_name:ServeReplica\n\n")
    assert last_lines([log, silent, gone], 1) == ["waiting for a port"]
    assert last_lines([], 3) == []


class Clock:
    """Seconds that advance by 0.2 with each look at the work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.waits: list[float] = []
        monkeypatch.setattr(start_progress, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(start_progress, "wait", self.wait)
        monkeypatch.setattr(start_progress, "_in_thread", lambda work: SimpleNamespace(result=work, exception=lambda: None))
        self.done_at = float("inf")

    def wait(self, outcomes: list[object], timeout: float) -> SimpleNamespace:
        self.waits.append(timeout)
        self.now = round(self.now + timeout, 3)
        return SimpleNamespace(done=self.now >= self.done_at)


def test_a_line_is_printed_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    clock, printed = Clock(monkeypatch), []
    start = progress(600, printed, [log])
    clock.done_at = 124.9
    assert start.during("loading", lambda: 7) == 7
    assert printed == ["10 s: loading · waiting for a port", "20 s: loading · waiting for a port"]
    assert set(clock.waits) == {0.2}
    clock.done_at = 131.0
    start.during("warming up", lambda: 8)
    assert printed[2:] == ["30 s: warming up · waiting for a port"]


def test_a_line_without_a_log_names_the_wait_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, printed = Clock(monkeypatch), []
    clock.done_at = 111.0
    progress(600, printed, []).during("loading", lambda: 7)
    assert printed == ["10 s: loading"]


def test_time_left_counts_down_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    start = progress(30, [], [])
    assert start.left_s == 30
    clock.now += 12
    assert start.left_s == 18
    clock.now += 18.5
    assert start.left_s == 0


def test_the_deadline_is_shared_by_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    start = progress(30, [], [], lambda: "0 of 1 up")
    clock.done_at = 129.0
    start.during("loading", lambda: 7)
    clock.done_at = float("inf")
    with pytest.raises(UserError, match=r"within 30 s\. It was still warming up") as error:
        start.during("warming up", lambda: 8)
    assert clock.waits[-1] == 5.0, "for the description"
    assert 130 <= clock.now - 5.0 <= 130.2
    assert "0 of 1 up" not in error.value.cause, "the description hung"


def test_default_limits_are_ten_and_thirty_minutes() -> None:
    assert start_progress.DEFAULT_LIMIT_S == {"cpu": 600.0, "gpu": 1800.0}


def test_the_last_ten_lines_are_shown_up_to_200_characters(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(f"line {number}\n" for number in range(12)) + "x" * 201 + "\n")
    assert last_lines([file], 2) == ["line 11", "x" * 200]
    shown = start_progress.shown([file])
    assert shown.splitlines()[:3] == ["", "The last lines of an engine's log:", "  line 3"]
    assert len(shown.splitlines()) == 12 and shown.endswith("\n  " + "x" * 200)
    assert start_progress.shown([]) == ""
