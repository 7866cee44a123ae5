"""Functions that the workers of a test run. Pipelines and groups stay in the process for later ones."""

import functools
import os
import signal
from pathlib import Path
from typing import Any

import torch

from strata.planner.diffusion.layout_rules import PictureLayout
from strata.serving.diffusion.attention import Site
from strata.serving.diffusion.parallel.group import Group, connect
from strata.serving.diffusion.parallel.sequence import SequenceAttention, gather, share
from strata.serving.diffusion.pipeline import Pipeline, load_pipeline
from strata.serving.diffusion.sampling import Cancelled, Picture, decode, sample, sample_latents
from strata.serving.diffusion.step_cache import StepCache


@functools.cache
def loaded(folder: Path) -> Pipeline:
    return load_pipeline(folder)


@functools.cache
def connected(layout: PictureLayout, warm_up: int = 2, timeout_s: float = 30.0) -> Group:
    return connect(layout, warm_up, timeout_s)


def latents(folder: Path, layout: PictureLayout, batches: list[list[Picture]], warm_up: int = 2) -> list[torch.Tensor]:
    workers = connected(layout, warm_up)
    with torch.inference_mode():
        return [sample_latents(loaded(folder), batch, workers=workers).clone() for batch in batches]


def cached(folder: Path, layout: PictureLayout, batch: list[Picture], threshold: float) -> tuple[torch.Tensor, int, int]:
    cache = StepCache(threshold)
    with torch.inference_mode():
        return sample_latents(loaded(folder), batch, None, connected(layout), cache).clone(), cache.computed, cache.skipped


def pictures(folder: Path, layout: PictureLayout, batch: list[Picture]) -> list[Any]:
    return sample(loaded(folder), batch, workers=connected(layout))


def decoded(folder: Path, layout: PictureLayout, values: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return decode(loaded(folder), values, connected(layout)).clone()


def split_attention(
    layout: PictureLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, image: int, text: int
) -> torch.Tensor:
    """Attention over tokens (image, then text) of which each worker has its shares, put together again."""
    workers = connected(layout)
    mine = [share(image, workers.sequence), share(text, workers.sequence)]
    local = [torch.cat((x[:, :image][:, mine[0]], x[:, image:][:, mine[1]]), dim=1) for x in (q, k, v)]
    out = SequenceAttention(workers, image, text)(Site("test", joint=True), *local)
    count = mine[0].stop - mine[0].start
    parts = [gather(part, workers.sequence, n, 1) for part, n in ((out[:, :count], image), (out[:, count:], text))]
    return torch.cat(parts, dim=1)


def cancelled(folder: Path, layout: PictureLayout, batch: list[Picture], at: int, how: str) -> str:
    """The outcome of a call that worker 0 ends at a step, then of an ordinary one after it."""

    def on_step(step: int, steps: int, _: torch.Tensor) -> bool:
        if step == at and how == "raise":
            raise RuntimeError("on_step")
        return step != at

    workers = connected(layout)
    outcome = "complete"
    try:
        sample(loaded(folder), batch, on_step, workers)
    except (Cancelled, RuntimeError) as e:
        outcome = type(e).__name__
    sample(loaded(folder), batch, None, workers)
    return outcome


def dying(folder: Path, layout: PictureLayout, batch: list[Picture], victim: int, at: int, how: int) -> str:
    """Sampling during which one worker kills or stops itself in the middle of a step."""
    workers = connected(layout, timeout_s=3.0)
    pipeline = loaded(folder)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if workers.rank == victim and calls == at:
            os.kill(os.getpid(), how)

    pipeline.family.blocks(pipeline.transformer)[0].register_forward_pre_hook(count)
    pipeline.family.blocks(pipeline.transformer)[-1].register_forward_pre_hook(count)
    try:
        sample(pipeline, batch, workers=workers)
    except RuntimeError as e:
        return f"error: {e}"
    return "complete"


KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
