"""Process that has imported vLLM and forks itself for every engine replica that Ray starts on this machine.

It ends with the command that started it. Its forks end with their Ray node.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from strata.serving.fork_server import launch
from strata.serving.ray_patches import process_title
from strata.serving.vllm_patches import preforked_engine

# What Ray runs in place of its Python interpreter.
LAUNCHER = f"{sys.executable} -I -S {launch.__file__}"


@dataclass(frozen=True)
class Warm:
    runtime_env: dict[str, Any]  # merged into the replicas' runtime environment
    _ready: int  # readable when the import of vLLM has finished or failed

    def wait(self, limit_s: float) -> None:
        """Waits for the import of vLLM. Replicas started before its end import vLLM themselves."""
        select.select([self._ready], [], [], limit_s)


@contextmanager
def running(environment: Mapping[str, str]) -> Iterator[Warm]:
    """Starts the server, without waiting for the import. `environment` is the replicas': vLLM reads parts of it when imported."""
    with tempfile.TemporaryDirectory(prefix="strata-warm-") as folder:
        path = Path(folder) / "socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen(64)
        lifeline, held = os.pipe()
        ready, signal_ready = os.pipe()
        passed = (listener.fileno(), lifeline, signal_ready)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, passed)],
            env=os.environ | environment,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        listener.close()
        os.close(lifeline)
        os.close(signal_ready)
        variables = {launch.SOCKET: str(path), launch.PYTHON: sys.executable}
        try:
            yield Warm({"py_executable": LAUNCHER, "env_vars": variables}, ready)
        finally:
            os.close(held)
            os.close(ready)
            process.kill()
            process.wait()


def serve(listener: socket.socket, lifeline: int) -> None:
    while True:
        ready, _, _ = select.select([listener.fileno(), lifeline], [], [])
        if lifeline in ready:
            return
        connection, _ = listener.accept()
        with connection, suppress(ConnectionError):
            data, given, _, _ = socket.recv_fds(connection, launch.LARGEST, 3)
            if data and not _hung_up(connection):
                pid = os.fork()
                if pid == 0:
                    for fd in (listener.fileno(), connection.fileno(), lifeline):
                        os.close(fd)
                    _become_worker(json.loads(data), given)
                connection.send(str(pid).encode())
            for fd in given:
                os.close(fd)


def _hung_up(connection: socket.socket) -> bool:
    """True if the launcher is gone: after its time limit it starts Python itself."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


class _NoRay(MetaPathFinder):
    """Blocks the import of Ray, which reads a worker's environment once, on import. vLLM works without it."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "ray":
            raise ModuleNotFoundError("Ray is loaded after the fork", name="ray")


def _import_vllm() -> None:
    without_ray = _NoRay()
    sys.meta_path.insert(0, without_ray)
    try:
        from strata.serving.engine import engine  # noqa: F401
    finally:
        sys.meta_path.remove(without_ray)


def _become_worker(wanted: dict[str, Any], given: list[int]) -> None:
    """Becomes the worker that Ray wanted to start. Does not return."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd, target in zip(given, (0, 1, 2), strict=True):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.clear()
        os.environ.update(wanted["environment"])
        os.chdir(wanted["folder"])
        preforked_engine.fork()
        process_title.install()
        script = wanted["argv"][0]
        sys.argv[:] = wanted["argv"]
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles a terminal's Ctrl-C
    _import_vllm()
    process_title.locate()
    os.close(int(sys.argv[3]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the replicas
    gc.collect()
    gc.freeze()
    serve(listener, int(sys.argv[2]))


if __name__ == "__main__":
    main()
