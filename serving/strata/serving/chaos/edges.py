"""Kills while an endpoint starts or stops. It must come up or end with an error message, and leave no processes."""

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from strata.serving import client
from strata.serving.chaos.kills import Fault
from strata.serving.chaos.victims import Processes, Replica

Edge = Literal["start", "stop"]

LOOK_S = 0.1
LATEST_S = 5.0  # latest kill, after the process has appeared
LIMIT_S = 600.0
STOP_LIMIT_S = 90.0
LEFT_S = 60.0  # Ray's agents need that long to notice the end of their node
RAW = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Ending:
    fault: Fault
    what: str  # description of the outcome
    holds: bool


def kill_at_start(command: Sequence[str], log: Path, url: str, fault: Fault, seed: int) -> Ending:
    with _running(command, log) as (process, descendants):
        killed = _kill(Processes(process.pid), fault, random.Random(f"start {fault} {seed}"), lambda: process.poll() is None)
        if not killed:
            return Ending(fault, f"no process to kill: {_tail(log)}", False)
        came_up, code = _comes_up(process, url), process.poll()
        if came_up:
            _end(process)
            code = process.returncode
    left = _left(descendants)
    raw = RAW in log.read_text(errors="replace")
    happened = "came up" if came_up else f"ended with code {code}: {_tail(log)}"
    clean = code == 0 if came_up else code not in (0, None)
    return Ending(fault, happened + _complaints(raw, left), clean and not raw and not left)


def kill_at_stop(command: Sequence[str], log: Path, url: str, fault: Fault, seed: int) -> Ending:
    draw = random.Random(f"stop {fault} {seed}")
    with _running(command, log) as (process, descendants):
        if not _comes_up(process, url):
            return Ending(fault, f"it did not come up: {_tail(log)}", False)
        descendants |= set(psutil.Process(process.pid).children(recursive=True))
        victims = _choose(Processes(process.pid), fault, draw)
        process.send_signal(signal.SIGINT)
        time.sleep(draw.random())
        for victim in victims:
            Processes(process.pid).kill(victim)
        began = time.monotonic()
        ended = _wait(lambda: process.poll() is not None, STOP_LIMIT_S)
        took = time.monotonic() - began
    left = _left(descendants)
    raw = RAW in log.read_text(errors="replace")
    happened = (
        f"stopped after {took:.1f} s with code {process.returncode}" if ended else f"did not stop within {STOP_LIMIT_S:.0f} s"
    )
    return Ending(fault, happened + _complaints(raw, left), ended and process.returncode == 0 and not raw and not left)


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], set[psutil.Process]]]:
    """Yields the process and a set that collects its descendants."""
    descendants: set[psutil.Process] = set()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process, descendants
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants |= set(psutil.Process(process.pid).children(recursive=True))
        _end(process)


def _comes_up(process: subprocess.Popen[bytes], url: str) -> bool:
    try:
        client.wait_until_ready(url, process, LIMIT_S)
    except client.NotReady:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_LIMIT_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def _kill(population: Processes, fault: Fault, draw: random.Random, lives: Callable[[], bool]) -> bool:
    if not _wait(lambda: not lives() or all(population.find(kind) for kind in fault), LIMIT_S) or not lives():
        return False
    time.sleep(draw.uniform(0, LATEST_S))
    for victim in _choose(population, fault, draw):
        population.kill(victim)
    return True


def _choose(population: Processes, fault: Fault, draw: random.Random) -> list[Replica]:
    found = {kind: population.find(kind) for kind in fault}
    return [draw.choice(alive) for alive in found.values() if alive]


def _wait(true: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _left(descendants: set[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(list(descendants), timeout=LEFT_S)
    return list(alive)


def _complaints(raw: bool, left: Sequence[psutil.Process]) -> str:
    return ("; with a traceback" if raw else "") + (f"; {len(left)} processes are left" if left else "")


def _tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split()[-40:])
