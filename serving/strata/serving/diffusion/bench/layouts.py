"""Latency and throughput by layout over CPU workers, beside diffusers in one process, in alternating rounds.

One set of processes per number of workers stays up for all layouts of that number, so that rounds can alternate. Only one set
computes at a time. A worker has one thread.
"""

import contextlib
import math
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from strata.planner.diffusion.layout_rules import PictureLayout
from strata.serving.diffusion.bench.contenders import DIFFUSERS, OURS, contender, encode, pictures, scheduler_of
from strata.serving.diffusion.bench.models import PictureModel

MOST_WORKERS = 4
BATCH = 2
EXACT = 1e-4
LIMIT_S = 120.0  # of one answer of the workers
CACHE_THRESHOLD = 0.1
# Imported once, before the workers are forked.
PRELOADED = [__name__, "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3", "strata.serving.diffusion.sampling"]
LAYOUTS = (
    PictureLayout(ulysses=2),
    PictureLayout(ring=2),
    PictureLayout(cfg=2),
    PictureLayout(pipefusion=2),
    PictureLayout(ulysses=4),
    PictureLayout(ring=4),
    PictureLayout(ulysses=2, ring=2),
    PictureLayout(cfg=2, ulysses=2),
    PictureLayout(cfg=2, ring=2),
    PictureLayout(cfg=2, pipefusion=2),
)


@dataclass(frozen=True)
class Way:
    """A way to sample. `cache` is the threshold of the step cache; 0: no cache."""

    name: str
    layout: PictureLayout = PictureLayout()  # noqa: RUF009  frozen
    cache: float = 0.0


@dataclass
class LayoutRow:
    """Seconds of one picture and of a batch, per round. `psnr` compares the latents with those of one worker in decibels, over
    their range; "exact": equal within 1e-4."""

    name: str
    workers: int
    batch: int = BATCH
    seconds: list[float] = field(default_factory=list)
    batch_seconds: list[float] = field(default_factory=list)
    psnr: float | Literal["exact"] | None = None
    trouble: str | None = None


class Workers:
    """Sets of 1, 2, ... workers, with the same random weights."""

    def __init__(self, model: PictureModel, most: int) -> None:
        self.model, self.most = model, most
        self.sets: dict[int, list[Connection]] = {}
        self.processes: list[Any] = []

    def __enter__(self) -> "Workers":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.folder = tempfile.TemporaryDirectory()
        world = 1
        while world <= self.most:
            meeting = Path(self.folder.name) / f"{world}-workers"
            self.sets[world] = []
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(rank, world, meeting, self.model, theirs), daemon=True)
                process.start()
                theirs.close()
                self.sets[world].append(ours)
                self.processes.append(process)
            world *= 2
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (one for group in self.sets.values() for one in group):
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()

    def sample(self, way: Way, batch: int) -> tuple[float, Tensor]:
        """Seconds and latents of a batch. Raises if a worker has failed."""
        group = self.sets[way.layout.workers]
        for connection in group:
            connection.send((way, batch))
        answers = []
        for connection in group:
            if not connection.poll(LIMIT_S):
                raise TimeoutError(f"a worker has not answered in {LIMIT_S:.0f} s")
            answers.append(connection.recv())
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return answers[0]  # type: ignore[no-any-return]


def measure(workers: Workers, rounds: int) -> Iterator[list[LayoutRow]]:
    """All rows so far, after every round. The first round is a warm-up that compares the latents."""
    ways = [Way(DIFFUSERS), Way(OURS), Way("step cache", cache=CACHE_THRESHOLD)]
    ways += [Way(layout.name(), layout) for layout in LAYOUTS if layout.workers <= workers.most]
    rows = {way: LayoutRow(way.name, way.layout.workers) for way in ways}
    truth: Tensor | None = None
    for number in range(rounds + 1):
        for way, row in rows.items():
            if row.trouble is not None:
                continue
            try:
                seconds, latents = workers.sample(way, 1)
                if number == 0:
                    truth = latents if truth is None else truth
                    row.psnr = compare(latents, truth)
                else:
                    row.seconds.append(seconds)
                    row.batch_seconds.append(workers.sample(way, BATCH)[0])
            except Exception as error:
                row.trouble = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield list(rows.values())


def compare(latents: Tensor, truth: Tensor) -> float | Literal["exact"]:
    worst = float((latents - truth).abs().max())
    if worst <= EXACT:
        return "exact"
    mean = float((latents - truth).double().square().mean())
    return 20 * math.log10(float(truth.max() - truth.min())) - 10 * math.log10(mean)


def _work(rank: int, world: int, meeting: Path, model: PictureModel, orders: Connection) -> None:
    """Body of a worker: one answer per order, until None."""
    torch.set_num_threads(1)
    try:
        if world > 1:
            import torch.distributed as dist

            timeout = timedelta(seconds=LIMIT_S)
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timeout)
        sampler = _Sampler(model)
    except Exception as error:
        orders.send(f"{type(error).__name__}: {error}")
        raise
    with contextlib.suppress(EOFError):
        while (order := orders.recv()) is not None:
            try:
                orders.send(sampler.sample(*order))
            except Exception as error:
                orders.send(f"{type(error).__name__}: {error}")


class _Sampler:
    def __init__(self, model: PictureModel) -> None:
        from strata.serving.diffusion.pipeline import Pipeline

        torch.manual_seed(0)
        self.model = model
        transformer: Any = model.build(torch.device("cpu"), torch.float32)
        self.theirs = contender(DIFFUSERS, model, transformer)
        self.pipeline = Pipeline(model.family, transformer, scheduler_of(model), None, partial(encode, model, transformer))
        self.groups: dict[PictureLayout, Any] = {}

    def sample(self, way: Way, batch: int) -> tuple[float, Tensor]:
        from strata.serving.diffusion.parallel.group import ALONE, connect
        from strata.serving.diffusion.sampling import sample_latents
        from strata.serving.diffusion.step_cache import StepCache

        if way.layout not in self.groups:
            self.groups[way.layout] = ALONE if way.layout.workers == 1 else connect(way.layout)
        start = time.perf_counter()
        if way.name == DIFFUSERS:
            latents = self.theirs(self.model.steps, batch)
        else:
            cache = StepCache(way.cache) if way.cache else None
            batch_of = pictures(self.model, self.model.steps, batch)
            with torch.inference_mode():
                latents = sample_latents(self.pipeline, batch_of, workers=self.groups[way.layout], step_cache=cache)
        return time.perf_counter() - start, latents.clone()
