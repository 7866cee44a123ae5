"""Processes forked from a warm process: same environment as their launcher, and ended with it.

Without vLLM; test_failover.py has an endpoint with vLLM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from strata.serving.fork_server import launch
from strata.serving.fork_server.server import LAUNCHER

SERVER = """
import os, signal, socket, sys
from strata.serving.fork_server import server
from strata.serving.ray_patches import process_title
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
process_title.locate()
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen(8)
print("listening", flush=True)
server.serve(listener, 0)
"""
WORKER = """
import json, os, sys
print(json.dumps({
    "warm": "strata.serving.fork_server.server" in sys.modules,
    "argv": sys.argv, "name": __name__, "set": os.environ.get("ONLY_HERE"), "home": os.environ.get("SERVERS_OWN"),
    "folder": os.getcwd(), "pid": os.getpid(), "path": sys.path[0], "parent": os.getppid(),
}), flush=True)
exec(sys.argv[1])
"""


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "s")
    environment = os.environ | {"SERVERS_OWN": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin and process.stdout and process.stdout.readline()
        yield path
        process.stdin.close()  # its lifeline
        assert process.wait(timeout=20) == 0


def launched(path: str, folder: Path, action: str, **more: str) -> subprocess.Popen[str]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    environment = os.environ | {launch.SOCKET: path, launch.PYTHON: sys.executable} | more
    return subprocess.Popen(
        [*LAUNCHER.split(), str(script), action, "x y"],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_forked_process_has_the_environment_of_its_launcher(socket_path: str, tmp_path: Path) -> None:
    with launched(socket_path, tmp_path, "print('to stderr', file=sys.stderr)", ONLY_HERE="yes") as process:
        out, err = process.communicate(timeout=20)
    seen = json.loads(out)
    assert seen["warm"] and seen["name"] == "__main__" and seen["argv"][1:] == ["print('to stderr', file=sys.stderr)", "x y"]
    assert (seen["set"], seen["home"]) == ("yes", None) and seen["folder"] == seen["path"] == str(tmp_path)
    assert seen["pid"] != process.pid and err == "to stderr\n"


@pytest.mark.slow
def test_launcher_ends_with_its_process(socket_path: str, tmp_path: Path) -> None:
    with launched(socket_path, tmp_path, "import time; time.sleep(60)") as process:
        assert process.stdout
        pid = json.loads(process.stdout.readline())["pid"]
        assert process.poll() is None
        os.kill(pid, signal.SIGKILL)
        process.wait(timeout=10)
    assert not psutil.pid_exists(pid)  # nor is it a zombie


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_without_a_server_python_starts_normally(path: str, tmp_path: Path) -> None:
    with launched(path, tmp_path, "pass") as process:
        seen = json.loads(process.communicate(timeout=60)[0])
    assert seen["pid"] == process.pid and not seen["warm"]


@pytest.mark.slow
def test_exception_in_a_forked_process_does_not_end_the_server(socket_path: str, tmp_path: Path) -> None:
    with launched(socket_path, tmp_path, "raise RuntimeError('wrong')") as process:
        assert "RuntimeError: wrong" in process.communicate(timeout=20)[1]
    with launched(socket_path, tmp_path, "pass") as process:  # the server goes on
        assert json.loads(process.communicate(timeout=20)[0])["warm"]


@pytest.mark.slow
def test_engine_runs_in_the_preforked_process(socket_path: str, tmp_path: Path) -> None:
    action = (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); os.environ['LATER'] = 'set';"
        "from strata.serving.vllm_patches import preforked_engine;"
        "process = preforked_engine.Context().Process(target=os.system, args=('echo $LATER $PPID',));"
        "process.start(); process.join(20); print(process.pid, process.exitcode, preforked_engine._process.pid, flush=True)"
    )
    with launched(socket_path, tmp_path, action) as process:
        _, echoed, ended = process.communicate(timeout=100)[0].splitlines()
    pid, exitcode, planted = ended.split()
    assert pid == planted and exitcode == "0" and echoed == f"set {pid}"


@pytest.mark.slow
def test_engine_and_replica_have_different_titles(socket_path: str, tmp_path: Path) -> None:
    action = (
        "from strata.serving.vllm_patches.preforked_engine import Context;"
        "from setproctitle import setproctitle; setproctitle('ray::replica');"
        "code = 'from setproctitle import setproctitle; setproctitle(\\'VLLM::EngineCore\\'); import time; time.sleep(15)';"
        "process = Context().Process(target=exec, args=(code,)); process.start(); print(process.pid, flush=True);"
        "process.join()"
    )
    with launched(socket_path, tmp_path, action) as process:
        assert process.stdout
        replica, engine = json.loads(process.stdout.readline())["pid"], psutil.Process(int(process.stdout.readline()))
        deadline = time.monotonic() + 10
        while not engine.cmdline()[0].startswith("VLLM::EngineCore"):
            assert time.monotonic() < deadline, engine.cmdline()
            time.sleep(0.05)
        assert psutil.Process(replica).cmdline()[0].startswith("ray::replica") and engine.name().startswith("VLLM::EngineCor")
        os.kill(replica, signal.SIGKILL)
        engine.kill()


@pytest.mark.slow
def test_preforked_process_ends_with_its_replica(socket_path: str, tmp_path: Path) -> None:
    action = (
        "from strata.serving.vllm_patches import preforked_engine; print(preforked_engine._process.pid, flush=True);"
        "import time; time.sleep(60)"
    )
    with launched(socket_path, tmp_path, action) as process:
        assert process.stdout
        replica, preforked = json.loads(process.stdout.readline())["pid"], int(process.stdout.readline())
        assert psutil.Process(preforked).ppid() == replica
        os.kill(replica, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while psutil.pid_exists(preforked) and psutil.Process(preforked).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
