"""A process that has imported vLLM and forks itself for every engine replica that Ray starts on this machine.

It ends with the command that started it. Replicas that it forked do not end with it, but with their Ray node.
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
from pathlib import Path
from typing import Any

from strata.serving.warm import launch, seed

# What Ray runs in place of its Python interpreter.
LAUNCHER = f"{sys.executable} -I -S {launch.__file__}"


@contextmanager
def running(environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """`environment` is the replicas' own: some of it is read while vLLM is imported. Yields what their runtime environment needs;
    the import goes on meanwhile."""
    with tempfile.TemporaryDirectory(prefix="strata-warm-") as folder:
        path = Path(folder) / "socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen(64)
        lifeline, held = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), str(lifeline)],
            env=os.environ | environment,
            pass_fds=(listener.fileno(), lifeline),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        listener.close()
        os.close(lifeline)
        try:
            yield {"py_executable": LAUNCHER, "env_vars": {launch.SOCKET: str(path), launch.PYTHON: sys.executable}}
        finally:
            os.close(held)
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
            if not data:
                continue
            pid = os.fork()
            if pid == 0:
                for fd in (listener.fileno(), connection.fileno(), lifeline):
                    os.close(fd)
                _become(json.loads(data), given)
            for fd in given:
                os.close(fd)
            connection.send(str(pid).encode())


def _become(wanted: dict[str, Any], given: list[int]) -> None:
    """The worker that Ray wanted to start. Does not return."""
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
        seed.plant()
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the command's
    from strata.serving import engine  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the replicas here
    gc.collect()
    gc.freeze()
    serve(listener, int(sys.argv[2]))


if __name__ == "__main__":
    main()
