"""Becomes a Ray worker that has vLLM imported, by asking the server for a fork; without a server, by starting Python as usual.

Run by file name, without site packages: only what Python itself brings is imported, so that it takes no time.
"""

import json
import os
import select
import socket
import sys

SOCKET = "STRATA_WARM_SOCKET"
PYTHON = "STRATA_WARM_PYTHON"
LARGEST = 2**20
# Ray gives up a worker that has not told of itself after a minute.
WAIT_S = 30.0


def main() -> None:
    pid = _forked(os.environ.get(SOCKET, ""))
    if pid is None:
        python = os.environ[PYTHON]
        os.execv(python, [python, *sys.argv[1:]])
    try:
        child = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    # Ray knows the worker by its own process number. Until it has been told, it takes the end of this process for a failed start.
    select.select([child], [], [])


def _forked(path: str) -> int | None:
    folder = os.getcwd()  # noqa: PTH109  (pathlib takes longer to import than all of this takes)
    request = json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ), "folder": folder}).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST)
            server.settimeout(WAIT_S)
            server.connect(path)
            socket.send_fds(server, [request], [0, 1, 2])
            answer = server.recv(64)
    except OSError:
        return None
    return int(answer) if answer else None


if __name__ == "__main__":
    main()
