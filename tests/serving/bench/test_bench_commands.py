"""`strata bench startup` and `strata bench serve` from the command to the written file.

Servers that need seconds to start are stand-ins, except in tests marked `rotation`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import STRATA
from typer.testing import CliRunner

from strata.platform import ports
from strata.platform.cli import build
from strata.platform.errors import UserError
from strata.serving.bench import plot, startup
from strata.serving.bench.clients import calibration
from strata.serving.bench.contenders import contenders

# Answers completions with as many events as tokens are wanted, or at once if none are streamed.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def do_GET(self): self.send_error(404)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        events = [{"choices": [{"text": " x"}]}] * asked["max_tokens"]
        events += [{"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}]
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\\n\\n" for event in events) + b"data: [DONE]\\n\\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """Restores the handler of SIGTERM, which both commands set."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


READY = "(self.send_response(200), self.send_header('content-length', '0'), self.end_headers())"


def started(count: int, code: str = SERVER) -> startup.Starter:
    def start(chosen: object, held: contextlib.ExitStack) -> startup.Started:
        places = [held.enter_context(ports.reserve()).port for _ in range(count)]
        servers = [startup._popen([sys.executable, "-c", code, str(port)], {}, number) for number, port in enumerate(places)]
        return servers, [f"http://127.0.0.1:{port}" for port in places]

    return start


@pytest.mark.slow
def test_bench_startup_alternates_and_writes_medians(model: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_start_ours", started(1))
    monkeypatch.setattr(startup, "_start_bare", started(2))
    done = CliRunner().invoke(build(), ["bench", "startup", "--model", str(model), "--repeat", "2"])
    assert done.exit_code == 0, done.output or done.exception
    lines = [line.partition(":")[2].split(" ")[1:-2] for line in done.stdout.splitlines() if line.startswith("round ")]
    assert lines == [["strata", "serve"], ["two", "bare", "vLLM", "servers"]] * 2
    written = json.loads((own_home / ".strata" / "bench" / "startup.json").read_text())
    assert written["benchmark"] == "startup" and written["partial"] is False
    assert {name: len(seconds) for name, seconds in written["seconds"].items()} == {startup.OURS: 2, startup.BARE: 2}
    assert written["ratio_of_medians"] > 0 and "ratio" in done.stdout


def test_bench_startup_reports_a_server_that_ended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_start_ours", started(1, "import sys; print('no memory'); sys.exit(3)"))
    done = CliRunner().invoke(build(), ["bench", "startup", "--model", str(model), "--repeat", "1"])
    assert isinstance(done.exception, UserError)
    assert "A server ended with code 3" in str(done.exception) and "no memory" in str(done.exception)


@pytest.mark.slow
def test_bench_startup_on_a_gpu_compares_a_ready_pair_with_one_server(
    model: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    caches: list[str] = []

    def start(command: list[str], environment: dict[str, str], number: int) -> subprocess.Popen[bytes]:
        commands.append(command)
        caches.append(os.environ["VLLM_CACHE_ROOT"])
        given = [word.removeprefix("serve.port=") for word in command if word.startswith("serve.port=")]
        port = given[0] if given else command[command.index("--port") + 1]
        return popen([sys.executable, "-c", SERVER.replace("self.send_error(404)", READY), port], environment, number)

    popen = startup._popen
    monkeypatch.setattr(startup, "_popen", start)
    words = ["bench", "startup", "--model", str(model), "--recipe", "h200", "--repeat", "1"]
    done = CliRunner().invoke(build(), words)
    assert done.exit_code == 0, done.output or done.exception
    ours, bare = commands
    assert caches[0] != caches[1] and not any(Path(cache).exists() for cache in caches)
    assert ours[ours.index("--recipe") + 1] == "h200"
    assert ours[ours.index("--model") + 1] == bare[bare.index("--model") + 1] == str(model)
    assert bare[bare.index("--gpu-memory-utilization") + 1] == "0.85" and "--kv-transfer-config" not in bare
    written = json.loads((own_home / ".strata" / "bench" / "startup.json").read_text())
    assert written["seconds"].keys() == {startup.OURS, startup.BARE_GPU}


def test_bench_startup_needs_a_prefill_engine(model: Path) -> None:
    done = CliRunner().invoke(build(), ["bench", "startup", "--model", str(model), "serve.prefill.replicas=0"])
    assert isinstance(done.exception, UserError) and "serve.prefill.replicas=1" in str(done.exception)


@pytest.mark.slow
def test_bench_serve_drives_its_contenders_to_the_end(model: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(subject: object, caching: bool, port: int) -> contenders.Launch:
        return contenders.Launch([sys.executable, "-c", SERVER, str(port)], {})

    monkeypatch.setitem(contenders.CONTENDERS, "vllm", contenders.Contender("stand-in", launch))
    monkeypatch.setattr(calibration, "calibrate", lambda clients: calibration.Calibration(clients, 1e5, 0.01, 0.01, 0.01))
    monkeypatch.setattr(plot, "draw", lambda *_: b"a picture")
    options = ["--contenders", "vllm", "--concurrency", "1", "--requests", "4", "--clients", "1", "--input", "8", "--output", "4"]
    done = CliRunner().invoke(build(), ["bench", "serve", "--model", str(model), *options])
    assert done.exit_code == 0, done.output or done.exception
    file = own_home / ".strata" / "bench" / "serve.json"
    assert f"written to {file}" in done.stdout.replace("\n", " ") and file.with_suffix(".png").read_bytes() == b"a picture"
    written = json.loads(file.read_text())
    (level,) = written["contenders"]["vllm"]["levels"]
    assert level["summary"]["requests"] == 4 and not written.get("partial")


def strata(home: Path, *words: str) -> str:
    environment = os.environ | {"STRATA_HOME": str(home)}
    done = subprocess.run([STRATA, *words], env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.rotation
def test_bench_startup_with_real_servers(trained: Path, tmp_path: Path) -> None:
    out = strata(trained, "bench", "startup", "--run", "tiny", "--repeat", "1", "--json", str(tmp_path / "startup.json"))
    written = json.loads((tmp_path / "startup.json").read_text())
    assert all(len(seconds) == 1 and seconds[0] > 1 for seconds in written["seconds"].values()) and "ratio" in out
    (bare,) = written["phases"][startup.BARE]  # Strata's engines on CPUs are forked, and write no log
    assert bare.keys() == {"engine", "engine 2"}
    assert all(phases["imports"] > 0 and "warm-up" in phases for phases in bare.values())


@pytest.mark.rotation
def test_bench_serve_with_a_real_endpoint(trained: Path, tmp_path: Path) -> None:
    options = ["--contenders", "strata-team", "--concurrency", "1", "--requests", "4", "--input", "16", "--output", "8"]
    strata(trained, "bench", "serve", "--run", "tiny", *options, "--json", str(tmp_path / "serve.json"))
    (level,) = json.loads((tmp_path / "serve.json").read_text())["contenders"]["strata-team"]["levels"]
    assert level["summary"]["requests"] == 4
