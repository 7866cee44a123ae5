"""`strata bench serve` when one of its processes dies, and when it is interrupted."""

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from dying_children import exits_at_start, second_client_exits_at_start

from strata.platform import ports
from strata.platform.errors import UserError
from strata.serving.bench.clients import calibration, load
from strata.serving.bench.clients.load import Level, Target
from strata.serving.bench.clients.workloads import Workload

WORKLOAD = Workload("uniform", vocab=100, input=8, output=20, long_input=0, long_share=0, turns=1)

# A contender that answers completions with an event every 10 ms.
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def do_GET(self): self.send_error(404)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        def event(tree):
            data = b"data: " + (tree if isinstance(tree, bytes) else json.dumps(tree).encode()) + b"\\n\\n"
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
        for _ in range(asked["max_tokens"]):
            time.sleep(0.01)
            event({"choices": [{"text": " x"}]})
        event({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})
        event(b"[DONE]")
        self.wfile.write(b"0\\r\\n\\r\\n")
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

# `strata bench serve` after option parsing, with SERVER as its only contender.
BENCH = """
import sys
import typer
from pathlib import Path
from strata.platform.recipe import ServeSection
from strata.serving.bench import command, plot
from strata.serving.bench.clients import calibration
from strata.serving.bench.contenders import contenders, subject

def launch(subject, caching, port):
    return contenders.Launch([sys.executable, "-c", sys.argv[2], str(port)], {})

def choose(*words):
    return subject.Subject(Path("."), "model", ServeSection(), (), 100, 256)

if __name__ == "__main__":
    contenders.CONTENDERS["vllm"] = contenders.Contender("paced", launch)
    calibration.calibrate = lambda clients: calibration.Calibration(clients, 1e5, 0.01, 0.01, 0.01)
    plot.draw = lambda *_: b"a picture"
    subject.choose = choose
    try:
      command.bench_serve(
        contenders="vllm", concurrency="2,4", requests=int(sys.argv[3]), input=8, output=10, clients=2, json=Path(sys.argv[1]),
        workload="uniform", long_input=8, long_share=0.0, turns=2, waves=1, rounds=1, seconds=1.0, slo_ttft_ms=500.0,
        slo_itl_ms=50.0, seed=0, rate=None, plot=None, model=None, run=None, recipe=None, overrides=None,
        dummy_model_wanted=False, side_by_side=False, cross_check=False,
      )
    except typer.Exit as end:
        sys.exit(end.exit_code)
"""


def test_calibration_server_that_dies_at_the_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_serve", exits_at_start)
    began = time.monotonic()
    with pytest.raises(UserError, match="calibration server ended with code 7"):
        calibration.calibrate(1)
    assert time.monotonic() - began < 20


def test_client_that_dies_at_the_start_ends_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_client", second_client_exits_at_start)
    began = time.monotonic()
    with ports.reserve() as nobody, pytest.raises(UserError, match="ended with code 9 before it was done"):
        load.run(Target("127.0.0.1", nobody.port, "model"), WORKLOAD, Level(8, concurrency=4), clients=2, seed=0)
    assert time.monotonic() - began < 30
    assert not multiprocessing.active_children()


def interrupted(tmp_path: Path, number: signal.Signals, requests: int, wait_for: str, then_s: float) -> tuple[str, int]:
    script, output = tmp_path / "bench.py", tmp_path / "bench.out"
    script.write_text(BENCH)
    with output.open("wb") as stream:
        command = [sys.executable, str(script), str(tmp_path / "serve.json"), SERVER, str(requests)]
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while wait_for not in output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        time.sleep(then_s)
        descendants = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        code = process.wait(timeout=60)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(descendants, timeout=5)
    assert not alive, "a process outlived the benchmark"
    return output.read_text(), code


@pytest.mark.slow
def test_partial_results_are_shown_and_written(tmp_path: Path) -> None:
    """Interrupts the second level, which takes three seconds and its clients' start. Its finished requests count."""
    printed, code = interrupted(tmp_path, signal.SIGINT, 120, wait_for="concurrency 2: ", then_s=2.5)
    assert code == 130 and "Traceback" not in printed
    assert "These are the results so far" in printed and "tok/read" in printed
    written = json.loads((tmp_path / "serve.json").read_text())
    assert written["partial"] is True
    levels = written["contenders"]["vllm"]["levels"]
    assert levels[0]["summary"]["requests"] == 120 and levels[0]["level"]["concurrency"] == 2
    if len(levels) == 2:  # on a busy machine its clients may still be starting
        assert 0 < levels[1]["summary"]["requests"] <= 120


@pytest.mark.slow
def test_interrupt_before_any_result(tmp_path: Path) -> None:
    printed, code = interrupted(tmp_path, signal.SIGTERM, 40, wait_for="answers after", then_s=0.0)
    assert code == 130 and "Stopped before anything was measured." in printed and "Traceback" not in printed
