"""Thread of a worker that publishes its progress once a second.

It writes to a file in memory, which the worker's sentinel process reads. So a worker that is stopped or killed leaves its last
words, and storage that hangs delays no worker.
"""

import faulthandler
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from strata.training.watchdog import flight, ray_node, sentinel
from strata.training.watchdog.pulse import Pulse

BEAT_S = 1.0
QUIET_S = 3.0  # without a mark, after which the collectives are published too
STUCK_S = 4.0  # without a beat, after which the C library's thread writes the stacks: another thread holds the GIL
MOST_FRAMES = 16
SHARED_MEMORY = Path("/dev/shm")


def folder(run: Path) -> Path:
    """Folder of the ranks' reports. The driver creates it; without it nobody reads them, and no monitor starts."""
    return run / "watch"


class Monitor:
    """Context manager around the training function, called on every rank."""

    def __init__(self, run: Path, pulse: Pulse) -> None:
        self._folder, self._pulse = folder(run), pulse
        self._on = self._folder.is_dir() and Path("/proc/self/stat").exists()  # Linux
        self._ended = threading.Event()
        self._resources = ExitStack()
        self._mark, self._since = -1, time.monotonic()
        self._groups: dict[str, list[dict[str, Any]]] = {}

    def __enter__(self) -> Self:
        if not self._on:
            return self
        rank, thread = dist.get_rank(), threading.get_native_id()
        self._thread = threading.get_ident()
        session = [f"{time.time_ns():020}"]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(session, 0)
        self._fixed = {
            "session": session[0],
            "rank": rank,
            "world": dist.get_world_size(),
            "host": socket.gethostname(),
            "node": ray_node.here(),
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES") or None,
            "pid": os.getpid(),
            "thread": f"{self._thread:#018x}",
        }
        memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        scratch = Path(tempfile.mkdtemp(prefix="strata-watch-", dir=memory))
        self._status, stacks = scratch / "status", scratch / "stacks"
        self._stacks = self._resources.enter_context(stacks.open("w"))
        order = {
            "scratch": str(scratch),
            "status": str(self._status),
            "stacks": str(stacks),
            "report": str(self._folder / f"rank-{rank}.json"),
            "kill": str(self._folder / f"kill-{session[0]}-{rank}"),
            "pid": os.getpid(),
            "created": sentinel.created(os.getpid()),
            "thread": thread,
        }
        faulthandler.enable(self._stacks)  # of a crash; the sentinel copies them to the worker's log
        self._publish()
        # Isolated and without site-packages: it starts in 20 ms and needs 10 MB. Its standard input ends with this process.
        self._sentinel = subprocess.Popen(
            [sys.executable, "-I", "-S", sentinel.__file__, json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        self._beats = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._beats.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._on:
            return
        self._ended.set()
        self._beats.join(BEAT_S)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable()
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in _summary(trace)]
        if error is not None:
            self._groups = flight.recorded(last_failed=any("/torch/distributed/" in frame for frame in frames[:3]))
        self._publish(
            ended="raised" if error is not None else "finished",
            error=f"{type(error).__name__}: {error}"[:1000] if error is not None else None,
            ended_at=time.time(),
            blamed=getattr(error, "ranks", None),
            **({"stack": frames} if frames else {}),
        )
        self._resources.close()
        assert self._sentinel.stdin
        self._sentinel.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._sentinel.wait(sentinel.LAST_S)

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            faulthandler.dump_traceback_later(STUCK_S, file=self._stacks)
            mark = self._pulse.marks + flight.operations()
            if mark != self._mark:
                self._mark, self._since, self._groups = mark, time.monotonic(), {}
            elif not self._groups and time.monotonic() - self._since > QUIET_S:
                self._groups = flight.recorded()
            self._publish()

    def _publish(self, **more: Any) -> None:
        frame = sys._current_frames().get(self._thread)
        status = {
            **self._fixed,
            "beat": time.time(),
            "step": self._pulse.step,
            "phase": self._pulse.phase,
            "marks": self._mark,
            "own_s": list(self._pulse.own_s),
            "stack": [f"{f.f_code.co_filename}:{f.f_lineno} {f.f_code.co_name}" for f in _frames(frame)],
            "groups": self._groups,
            "ended": None,
            **more,
        }
        partial = self._status.with_suffix(".new")
        with suppress(OSError):  # memory is full: the last status stays
            partial.write_text(json.dumps(status))
            partial.replace(self._status)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    found: list[FrameType] = []
    while frame is not None and len(found) < MOST_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found


def _summary(trace: TracebackType | None) -> list[Any]:
    import traceback

    return list(reversed(traceback.extract_tb(trace)))[:MOST_FRAMES]
