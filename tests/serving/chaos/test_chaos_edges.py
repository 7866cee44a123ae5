"""Kills while an endpoint starts or stops, against scripts that handle them correctly or not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.platform import ports
from strata.platform.errors import UserError
from strata.serving.chaos import command, edges
from strata.serving.chaos.victims import Kind

# A command with a child process titled as a decode replica. {on_loss} runs if the child ends before the command is ready.
SCRIPT = """
import http.server, signal, subprocess, sys, threading, time
replica = "import time; from setproctitle import setproctitle; setproctitle('ray::ServeReplica:strata:decode'); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", replica])
def stop(*_):
    {on_stop}
    child.kill(); child.wait(); sys.exit(0)
signal.signal(signal.SIGINT, stop)
began = time.time()
while time.time() - began < {starts_after}:
    if child.poll() is not None:
        {on_loss}
    time.sleep(0.05)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", {port}), Ready)
threading.Thread(target=server.serve_forever, daemon=True).start()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setproctitle")
    for name, seconds in {"LATEST_S": 0.1, "LIMIT_S": 15.0, "STOP_LIMIT_S": 1.5, "LEFT_S": 1.0}.items():
        monkeypatch.setattr(edges, name, seconds)


@pytest.fixture
def port() -> Iterator[ports.Reservation]:
    with ports.reserve() as held:
        yield held


def started(
    tmp_path: Path, port: ports.Reservation, on_loss: str = "pass", on_stop: str = "pass", starts_after: float = 2.0
) -> tuple[list[str], Path, str]:
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT.format(on_loss=on_loss, on_stop=on_stop, starts_after=starts_after, port=port.port))
    return [sys.executable, str(script)], tmp_path / "log", port.url


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_loss", "what", "holds"),
    [
        ("pass", "came up", True),
        ("print('error: a replica died'); sys.exit(1)", "ended with code 1: error: a replica died", True),
        ("raise TypeError('int')", "with a traceback", False),
        ("time.sleep(60)", "ended with code", False),
        ("sys.exit(0)", "ended with code 0", False),
    ],
)
def test_kill_at_start(
    on_loss: str, what: str, holds: bool, tmp_path: Path, port: ports.Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in on_loss:
        monkeypatch.setattr(edges, "LIMIT_S", 3.0)
    starts_after = 2.0 if on_loss == "pass" else 30.0  # a busy machine kills late
    ending = edges.kill_at_start(*started(tmp_path, port, on_loss=on_loss, starts_after=starts_after), (Kind.DECODE,), 0)
    assert what in ending.what and ending.holds is holds, ending


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_stop", "what", "holds"),
    [
        ("pass", "stopped after", True),
        ("time.sleep(60)", "did not stop", False),
        ("sys.exit(3)", "with code 3", False),
    ],
)
def test_kill_at_stop(on_stop: str, what: str, holds: bool, tmp_path: Path, port: ports.Reservation) -> None:
    ending = edges.kill_at_stop(*started(tmp_path, port, on_stop=on_stop, starts_after=1.0), (Kind.DECODE,), 0)
    assert what in ending.what and ending.holds is holds, ending


@pytest.mark.parametrize(("during", "url"), [("start", "http://127.0.0.1:1"), ("lunch", None)])
def test_bad_values_of_during(during: str, url: str | None) -> None:
    with pytest.raises(UserError, match="--during"):
        command.chaos(during=during, url=url)
