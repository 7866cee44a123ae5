"""Profile of a worker's steps on request: torch's profiler with Strata's ranges. Without a request it costs one look at the run's
folder per second."""

import gzip
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from strata.platform.files import write_atomic
from strata.training.profile import collectives, layers, request
from strata.training.profile.nsight import CudaProfile
from strata.training.profile.ranges import Ranges
from strata.training.profile.request import LOOK_EVERY_S, Request


class Profiler:
    """Follows the training loop of one rank. The loop calls `step` before each step and wraps other work in `range`.

    The profiler starts one step before the first requested one: the first step after a start is slower."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._run = worker, worker.job.run
        self._due = 0.0
        self._request: Request | None = None
        self._done: str | None = None
        self._profile: torch.profiler.profile | CudaProfile | None = None
        self._ranges: Ranges | None = None
        self._steps: list[int] = []
        self._open = ExitStack()  # the profile
        self._step = ExitStack()  # the range of the current step

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def range(self, name: str) -> AbstractContextManager[None]:
        return self._ranges.range(name) if self._ranges else nullcontext()

    def step(self, step: int) -> None:
        """Begins step number `step`."""
        self._step.close()
        if self._request is None:
            self._look(step)
        if self._request is None:
            return
        if self._profile is None and step >= self._request.first - 1:
            self._start()
        elif self._profile is not None and step > self._request.last:
            self.finish()
        elif self._profile is not None:
            self._profile.step()
            if self._ranges is None:
                self._ranges = Ranges()
                self._name_everything(self._ranges)
            self._steps.append(step)
            self._step.enter_context(self._ranges.range(f"step {step}"))

    def finish(self) -> None:
        """Ends the profile and writes it, if one runs."""
        self._step.close()
        self._open.close()
        profile, wanted = self._profile, self._request
        self._profile = self._request = None
        if profile is None or wanted is None:
            return
        self._done = wanted.id
        profile.stop()
        if self._ranges:
            self._ranges.close()
            try:
                _write(profile, wanted.folder(self._run), self._worker.rank, self._facts(self._ranges))
            except OSError as error:  # a full disk must not end the training
                print(f"The profile of rank {self._worker.rank} is lost: {error}", file=sys.stderr, flush=True)
        self._steps, self._ranges = [], None

    def _look(self, step: int) -> None:
        """A request for steps that are over is ignored; one for steps that have begun covers the rest of them."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LOOK_EVERY_S
        found = request.read(self._run)
        if found and found.id != self._done and found.last > step:
            self._request = found if found.includes(self._worker.rank) else None

    def _start(self) -> None:
        assert self._request
        self._profile = self._torch_profile(self._request) if self._request.tool == "torch" else CudaProfile()
        self._profile.start()

    def _torch_profile(self, wanted: Request) -> torch.profiler.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.device(self._worker.engine.device).type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        active = wanted.last - wanted.first + 1
        return torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=active + 1, repeat=1),
            record_shapes=True,
            profile_memory=True,
        )

    def _name_everything(self, ranges: Ranges) -> None:
        self._open.enter_context(ranges.garbage_collections())
        self._open.enter_context(layers.named(self._worker.engine.module, ranges))
        self._open.enter_context(collectives.named(ranges))
        self._open.enter_context(_reduction(self._worker.engine, ranges))
        self._open.enter_context(_phases(self._worker.watch, ranges))

    def _facts(self, ranges: Ranges) -> dict[str, Any]:
        device = torch.device(self._worker.engine.device)
        return {
            "rank": self._worker.rank,
            "steps": self._steps,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "matmul": torch.get_float32_matmul_precision(),
            "cpus": os.cpu_count(),
            "delays": ranges.delays,
        }


@contextmanager
def _phases(watch: Any, ranges: Ranges) -> Iterator[None]:
    before: Callable[[str], AbstractContextManager[None]] = watch.ranges
    watch.ranges = ranges.range
    try:
        yield
    finally:
        watch.ranges = before


@contextmanager
def _reduction(engine: Any, ranges: Ranges) -> Iterator[None]:
    """Names the reduction of gradients in shared memory, which is no collective of torch's."""
    reduce = engine.__dict__.get("buffered_allreduce_fallback")
    if reduce is None:
        yield
        return

    def named(*args: Any, **kwargs: Any) -> Any:
        with ranges.range("reduction"):
            return reduce(*args, **kwargs)

    engine.buffered_allreduce_fallback = named
    try:
        yield
    finally:
        engine.buffered_allreduce_fallback = reduce


def _write(profile: torch.profiler.profile | CudaProfile, folder: Path, rank: int, facts: dict[str, Any]) -> None:
    """Writes the trace, compressed, and then the facts about it: a rank with facts has a whole trace."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(profile, CudaProfile):  # its program writes the report
        write_atomic(folder / f"rank{rank}.json", json.dumps(facts))
        return
    plain, packed = folder / f".rank{rank}.json", folder / f".rank{rank}.json.gz"
    try:
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        packed.replace(folder / f"rank{rank}.trace.json.gz")
        write_atomic(folder / f"rank{rank}.json", json.dumps(facts))
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
