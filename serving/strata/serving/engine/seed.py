"""The engine's process, forked while the replica has one thread, and used when vLLM starts its engine.

vLLM would start a new interpreter, since a process with Ray's threads must not be forked. The seed is forked before there are
any, and waits: for the process object that vLLM would have handed to the interpreter, or for the end of its replica.
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
class _Seed:
    pid: int
    orders: int  # written to once
    alive: int  # readable when the process has ended
    used: bool = False


_seed: _Seed | None = None


def plant() -> None:
    """To be called by a process with one thread."""
    global _seed
    orders, ordering = os.pipe()
    alive, living = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ordering)
        os.close(alive)
        _wait_and_run(orders)
    os.close(orders)
    os.close(living)
    _seed = _Seed(pid, ordering, alive)


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
        assert _seed is not None and not _seed.used
        _seed.used = True
        written = BytesIO()
        multiprocessing.context.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            reduction.dump(dict(os.environ), written)
            reduction.dump(process_obj, written)
        finally:
            multiprocessing.context.set_spawning_popen(None)
        self.pid, self.sentinel = _seed.pid, _seed.alive
        self.finalizer = util.Finalize(self, util.close_fds, (_seed.orders, _seed.alive))  # type: ignore[attr-defined]
        with open(_seed.orders, "wb", closefd=False) as stream:
            stream.write(_SIZE.pack(written.getbuffer().nbytes) + written.getvalue())


class Process(multiprocessing.context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        kind = multiprocessing.popen_spawn_posix.Popen if _seed is None or _seed.used else _Popen
        return kind(process_obj)


class Context(multiprocessing.context.SpawnContext):
    Process = Process


def use() -> None:
    """Has vLLM start its engine in the seed, where there is one."""
    if _seed is not None:
        from vllm.v1.engine import utils

        utils.get_mp_context = Context
