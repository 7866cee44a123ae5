"""Engine process that is forked before Ray's threads exist, and used when vLLM starts its engine.

vLLM would start a new interpreter, since a process with Ray's threads must not be forked. This process is forked before there
are any. It waits for the process object that vLLM would have passed to the new interpreter, or for the end of its replica.

Written for vLLM 0.29. No longer needed when vLLM can start its engine in a given process; the test of this file fails when vLLM
starts the process in another way.
"""

import multiprocessing.context
import multiprocessing.popen_fork
import multiprocessing.popen_spawn_posix
import os
import pickle
import signal
import struct
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import reduction, util
from typing import Any

_SIZE = struct.Struct("!Q")


@dataclass
class _Preforked:
    pid: int
    orders: int  # pipe that receives the process object
    alive: int  # pipe that becomes readable when the process ends
    used: bool = False


_process: _Preforked | None = None


def fork() -> None:
    """Forks the process. The caller must have a single thread."""
    global _process
    orders, ordering = os.pipe()
    alive, living = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ordering)
        os.close(alive)
        _wait_and_run(orders)
    os.close(orders)
    os.close(living)
    _process = _Preforked(pid, ordering, alive)


def _wait_and_run(orders: int) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with open(orders, "rb") as stream:
            size = stream.read(_SIZE.size)
            if not size:  # the replica ended, or needs no engine
                os._exit(0)
            given = BytesIO(stream.read(_SIZE.unpack(size)[0]))
        os.environ.clear()
        os.environ.update(pickle.load(given))
        code = pickle.load(given)._bootstrap()
    finally:
        os._exit(code)


class _Popen(multiprocessing.popen_fork.Popen):
    method = "spawn"

    def _launch(self, process_obj: Any) -> None:
        assert _process is not None and not _process.used
        _process.used = True
        written = BytesIO()
        multiprocessing.context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            reduction.dump(dict(os.environ), written)
            reduction.dump(process_obj, written)
        finally:
            multiprocessing.context.set_spawning_popen(None)
        self.pid, self.sentinel = _process.pid, _process.alive
        self.finalizer = util.Finalize(self, util.close_fds, (_process.orders, _process.alive))  # type: ignore[attr-defined]
        with open(_process.orders, "wb", closefd=False) as stream:
            stream.write(_SIZE.pack(written.getbuffer().nbytes) + written.getvalue())


class Process(multiprocessing.context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        kind = multiprocessing.popen_spawn_posix.Popen if _process is None or _process.used else _Popen
        return kind(process_obj)


class Context(multiprocessing.context.SpawnContext):
    Process = Process


def install() -> None:
    """Makes vLLM start its engine in the preforked process, if there is one."""
    if _process is not None:
        from vllm.v1.engine import utils

        utils.get_mp_context = Context
