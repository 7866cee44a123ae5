"""Pictures of a trained model by the approximate ways to sample, the step cache and PipeFusion, beside those of one worker.

The captions are those of a picture folder's `metadata.jsonl`. Every way writes such a folder, so that `strata eval pictures` can
judge them.
"""

import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from PIL import Image

from strata.planner.diffusion.layout_rules import PictureLayout
from strata.platform.errors import UserError
from strata.serving.diffusion.bench.layouts import CACHE_THRESHOLD, Way
from strata.serving.diffusion.cache_cost import psnr, ssim

METADATA = "metadata.jsonl"
MOST = 64  # captions
BATCH = 16
LIMIT_S = 600.0  # of all pictures of a way
END_S = 5.0  # for a worker to end by itself
WAYS = (
    Way("one worker"),
    Way(f"step cache {CACHE_THRESHOLD}", cache=CACHE_THRESHOLD),
    Way(f"step cache {2 * CACHE_THRESHOLD}", cache=2 * CACHE_THRESHOLD),
    Way("pipefusion 2", PictureLayout(pipefusion=2)),
)


@dataclass(frozen=True)
class Drawn:
    """Pictures of a way, and the share of the evaluations of the blocks after the first that the step cache skipped."""

    pictures: list[np.ndarray]
    seconds: float
    skipped: float


@dataclass(frozen=True)
class QualityRow:
    """A way beside one worker. PSNR in dB over all pictures, None for equal ones; SSIM is the mean over the pictures."""

    name: str
    workers: int
    seconds: float
    skipped: float
    psnr: float | None
    ssim: float


def captions_of(path: Path) -> list[str]:
    """The first captions of a `metadata.jsonl`, each once."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        found = list(dict.fromkeys(str(row["text"]) for row in rows))
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"{path} cannot be read as captions: {type(error).__name__}: {error}."
        raise UserError(
            cause, f"Name a {METADATA} with a text in each row, such as 'strata data make pictures' writes."
        ) from None
    if not found:
        raise UserError(f"{path} has no captions.", f"Name a {METADATA} with a text in each row.")
    return found[:MOST]


def measure(model: Path, captions: Sequence[str], to: Path) -> Iterator[QualityRow]:
    """A row per way, after its pictures are written to a folder of its name in `to`. A picture's seed is its number."""
    truth: list[np.ndarray] | None = None
    for way in WAYS:
        drawn = draw(model, way, captions)
        truth = drawn.pictures if truth is None else truth
        write(to / way.name.replace(" ", "-"), drawn.pictures, captions)
        yield quality(way, drawn, truth)


def quality(way: Way, drawn: Drawn, truth: list[np.ndarray]) -> QualityRow:
    found = psnr(np.stack(drawn.pictures), np.stack(truth))
    alike = float(np.mean([ssim(a, b) for a, b in zip(drawn.pictures, truth, strict=True)]))
    return QualityRow(way.name, way.layout.workers, drawn.seconds, drawn.skipped, found if np.isfinite(found) else None, alike)


def write(folder: Path, pictures: Sequence[np.ndarray], captions: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        Image.fromarray(picture).save(folder / f"{number:03}.png")
        rows.append(json.dumps({"file_name": f"{number:03}.png", "text": caption}) + "\n")
    (folder / METADATA).write_text("".join(rows))


def draw(model: Path, way: Way, captions: Sequence[str]) -> Drawn:
    """Pictures of all captions by new processes, one per worker, with one thread each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "strata.serving.diffusion.sampling"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(way.layout.workers):
            here, there = context.Pipe()
            arguments = (rank, Path(folder) / "meeting", model, way, list(captions), there)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            answer = pipes[0].recv() if pipes[0].poll(LIMIT_S) else TimeoutError(f"no pictures in {LIMIT_S:.0f} s")
        except EOFError:
            answer = RuntimeError("a worker has died")
        finally:
            for process in processes:
                process.join(END_S)
                process.kill()
                process.join()
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, Drawn)
    return answer


def _work(rank: int, meeting: Path, model: Path, way: Way, captions: list[str], answers: Connection) -> None:
    """Body of a worker."""
    import torch
    import torch.distributed as dist
    from transformers.utils import logging

    from strata.serving.diffusion.parallel.group import connect
    from strata.serving.diffusion.pipeline import load_pipeline
    from strata.serving.diffusion.sampling import Picture, sample
    from strata.serving.diffusion.step_cache import StepCache

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    try:
        if (world := way.layout.workers) > 1:
            limit = timedelta(seconds=LIMIT_S)
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=limit)
        workers, pipeline = connect(way.layout), load_pipeline(model)
        pictures = [Picture(caption, seed=number) for number, caption in enumerate(captions)]
        cache = StepCache(way.cache) if way.cache else None
        drawn, skipped, computed, begin = [], 0, 0, time.perf_counter()
        for first in range(0, len(pictures), BATCH):
            drawn += sample(pipeline, pictures[first : first + BATCH], workers=workers, step_cache=cache)
            if cache:
                skipped, computed = skipped + cache.skipped, computed + cache.computed
        answers.send(Drawn(drawn, time.perf_counter() - begin, skipped / max(1, skipped + computed)))
    except Exception as error:
        answers.send(error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}"))
