"""Ranks as real processes on gloo, with the monitor of a worker, and faults planted in one of them.

A step has the phases and the kinds of collectives of a training step: gradients are summed, parameters gathered, the loss summed.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from strata.platform.recipe import ParallelSection, WatchdogSection
from strata.training.watchdog.monitor import Monitor
from strata.training.watchdog.pulse import Pulse
from strata.training.watchdog.watch import Watch

WORLD, VICTIM, AT = 3, 1, 40
FOREVER_S = 600.0
SO_ATTACH_FILTER = 26
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "strata.training.watchdog.monitor", "strata.training.watchdog.watch", "pytest", __name__]
)


@dataclass(frozen=True)
class Place:
    """Point of a step at which a fault is planted."""

    run: Path
    rank: int
    step: int
    pulse: Pulse


Fault = Callable[[Place], None]


class Step:
    """A training step. Each part can be replaced by a fault."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)
        self.gradients, self.parameters, self.loss = torch.ones(4096), torch.ones(1024), torch.ones(1)

    def data(self, place: Place) -> None:
        torch.rand(1000, generator=self._generator)

    def forward(self, place: Place) -> None:
        for _ in range(20):
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))

    def reduce(self, place: Place) -> None:
        dist.all_reduce(self.gradients)

    def gather(self, place: Place) -> None:
        dist.all_gather([torch.empty(1024) for _ in range(WORLD)], self.parameters)

    def sum_loss(self, place: Place) -> None:
        dist.all_reduce(self.loss)

    def checkpoint(self, place: Place) -> None:
        time.sleep(0.01)

    def run(self, place: Place) -> None:
        pulse = place.pulse
        pulse.enter("data")
        begin = time.perf_counter()
        self.data(place)
        pulse.enter("forward")
        self.forward(place)
        own = time.perf_counter() - begin
        pulse.enter("backward")
        self.reduce(place)
        pulse.enter("optimizer")
        self.gather(place)
        self.sum_loss(place)
        if place.step % 10 == 0:
            pulse.enter("checkpoint")
            self.checkpoint(place)
        pulse.stepped(place.step, own)


# Faults, which run in the victim from step AT on. Each replaces one part of the step.
def stop_process(place: Place) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die(place: Place) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(place: Place) -> None:
    raise ValueError("row 7 has no text")


def read_fifo(place: Place) -> None:
    path = place.run / "fifo"
    path.exists() or os.mkfifo(path)
    assert stat.S_ISFIFO(path.stat().st_mode)
    path.read_bytes()


def write_fifo(place: Place) -> None:
    path = place.run / "fifo"
    path.exists() or os.mkfifo(path)
    path.write_bytes(b"checkpoint")


def wait_for_data(place: Place) -> None:
    threading.Event().wait(FOREVER_S)


def loop_forever(place: Place) -> None:
    end = time.monotonic() + FOREVER_S
    while time.monotonic() < end:
        pass


def hold_the_gil(place: Place) -> None:
    ctypes.PyDLL("libc.so.6").sleep(int(FOREVER_S))  # unlike CDLL, it does not release the GIL


def lock_twice(place: Place) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def deadlock(place: Place) -> None:
    """Two threads that take two locks in opposite order."""
    first, second, ready = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            ready.wait()
            with first:
                pass

    threading.Thread(target=other, daemon=True).start()
    with first:
        ready.wait()
        with second:
            pass


def skip(place: Place) -> None:
    pass


def smaller(place: Place) -> None:
    dist.all_reduce(torch.ones(999))


def larger(place: Place) -> None:
    dist.all_reduce(torch.ones(9999))


def other_op(place: Place) -> None:
    dist.broadcast(torch.ones(4096), VICTIM)


def gather_first(place: Place) -> None:
    dist.all_gather([torch.empty(1024) for _ in range(WORLD)], torch.ones(1024))


def lose_connections(place: Place) -> None:
    """Has the kernel drop every packet that arrives at this process's connections, as a dead network card would."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: accept no bytes
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop))
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.family == socket.AF_INET and connection.getpeername():
                connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    dist.all_reduce(torch.ones(4096))


def sleep_a_little(place: Place) -> None:
    time.sleep(0.05)


def compute_more(place: Place) -> None:
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))


def lose_node(place: Place) -> None:
    """Stops the sentinel too: nothing of this node answers."""
    for pid in (int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        os.kill(pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def rank(number: int, run: Path, part: str, fault: Fault | None, early: bool) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{run}/store", rank=number, world_size=WORLD)
    pulse, step = Pulse(), Step(number)
    with Monitor(run, pulse):
        for at in range(1, 10**9):
            place = Place(run, number, at, pulse)
            if at == AT and number == VICTIM:
                (run / "planted").write_text(str(time.monotonic()))
                if early:
                    break
                if fault:
                    setattr(step, part, fault)
            step.run(place)
            time.sleep(0.02)
    time.sleep(FOREVER_S)


@contextmanager
def ranks(run: Path, part: str = "data", fault: Fault | None = None, early: bool = False) -> Iterator[list[int]]:
    """Starts all ranks and yields their process ids."""
    processes = [CONTEXT.Process(target=rank, args=(number, run, part, fault, early), daemon=True) for number in range(WORLD)]
    for process in processes:
        process.start()
    try:
        yield [process.pid or 0 for process in processes]
    finally:
        sentinels: list[psutil.Process] = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                sentinels += psutil.Process(process.pid).children()
            process.kill()
            process.join()
        for sentinel in sentinels:
            with contextlib.suppress(psutil.NoSuchProcess):
                sentinel.resume()  # one that a fault has stopped ends with its rank, too


def watch(run: Path, hang_s: float = 5.0) -> Watch:
    return Watch(run, WatchdogSection(hang_s=hang_s), ParallelSection(workers=WORLD))
