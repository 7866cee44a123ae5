"""Starts a Ray worker as a fork of the server, with vLLM imported; without a server, starts Python as usual.

Run by file name, without site packages, and with standard library imports only, so that it starts fast.
"""

import json
import os
import select
import socket
import sys

SOCKET = "STRATA_WARM_SOCKET"
PYTHON = "STRATA_WARM_PYTHON"
LARGEST = 2**20
# Ray gives up on a worker that has not registered after a minute.
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
    # Ray learns the worker's own pid when it registers. Until then, the end of this process would be a failed start.
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
