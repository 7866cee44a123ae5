"""Workers of a layout as plain processes with gloo, started once and given one function after another."""

import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import ROOT

CONTEXT = multiprocessing.get_context("forkserver")
# Imports that take seconds, once for all workers.
CONTEXT.set_forkserver_preload(["pytest", "strata.serving.diffusion.sampling", f"{__package__}.tiny_pictures", __name__])


class Workers:
    """Processes that run the same function with the same arguments, each after `torch.distributed` is initialized."""

    def __init__(self, count: int) -> None:
        if str(ROOT) not in sys.path:  # workers import the functions of `tests` by their names
            sys.path.append(str(ROOT))
        forkserver.ensure_running()
        self.folder = tempfile.TemporaryDirectory()
        self.processes, self.ends = [], []
        for rank in range(count):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, count, Path(self.folder.name) / "store", there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.ends.append(here)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        for end in self.ends:
            end.send((function, args))

    def result(self, rank: int, deadline_s: float = 60.0) -> Any:
        """The worker's result; an exception if it raised one, died, or had no result by the deadline."""
        try:
            if not self.ends[rank].poll(deadline_s):
                return TimeoutError("no result by the deadline")
            return self.ends[rank].recv()
        except (EOFError, OSError):
            return ConnectionError("the worker has died")

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(function, *args)
        results = [self.result(rank) for rank in range(len(self.ends))]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, count: int, store: Path, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=30))
    while True:
        function, args = end.recv()
        try:
            end.send(function(*args))
        except Exception as e:
            end.send(RuntimeError(f"{type(e).__name__}: {e}\n{traceback.format_exc()}"))
