"""`strata top` as a command: printed once, and live in a terminal with resizing and Ctrl-C."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from strata.platform import ports

from .test_top_endpoint import BEFORE, serving

TOP = [sys.executable, "-c", "import typer; from strata.monitoring.gpu_commands import top; typer.run(top)"]


@pytest.mark.slow
def test_prints_once_without_a_terminal() -> None:
    with serving(BEFORE) as port:
        answer = subprocess.run(
            [*TOP, "--url", f"http://127.0.0.1:{port}", "--interval", "0.2"], capture_output=True, text=True, timeout=30
        )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "no run is training" in answer.stdout
    assert "tiny: 1 decode, 1 gateway" in answer.stdout
    assert "KV 25%" in answer.stdout
    assert "\x1b" not in answer.stdout, "no colours in a file"


@pytest.mark.slow
def test_once_without_an_endpoint() -> None:
    with ports.reserve() as unused:
        words = [*TOP, "--once", "--url", unused.url, "--interval", "0.1"]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0
    assert f"no endpoint at {unused.url}" in answer.stdout


class Terminal:
    """Pseudo-terminal that runs `strata top`."""

    def __init__(self, *words: str) -> None:
        self._side, other = pty.openpty()
        self.resize(30, 100)
        self.process = subprocess.Popen(
            [*TOP, *words], stdin=other, stdout=other, stderr=other, env=os.environ | {"TERM": "xterm"}, start_new_session=True
        )
        os.close(other)
        self._seen = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, text: str) -> str:
        """Reads until `text` appears. Returns and discards the output before it."""
        deadline = time.monotonic() + 20
        while text not in self._seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self._seen[-3000:]!r}"
            if select.select([self._side], [], [], 0.1)[0]:
                try:
                    self._seen += os.read(self._side, 65536).decode(errors="replace")
                except OSError:  # the program has ended
                    assert text in self._seen, self._seen[-3000:]
        seen, self._seen = self._seen.split(text, 1)
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._side)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_live_until_a_signal(number: signal.Signals, own_home: Path) -> None:
    held = ports.reserve()
    terminal = Terminal("--url", held.url, "--interval", "0.2")
    try:
        terminal.wait_for("\x1b[?1049h")  # alternate screen, which restores the previous content at the end
        terminal.wait_for("no endpoint at")
        with serving(BEFORE, held.port):
            terminal.wait_for("KV 25%")
            terminal.resize(30, 60)
            terminal.wait_for("\x1b[H")
            terminal.wait_for("KV 25%")
        terminal.wait_for("no endpoint at")
        terminal.process.send_signal(number)
        rest = terminal.wait_for("\x1b[?1049l")
        assert terminal.process.wait(timeout=10) == 0
        assert "Traceback" not in rest
    finally:
        terminal.close()
        held.release()
