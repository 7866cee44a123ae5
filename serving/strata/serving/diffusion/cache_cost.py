"""Quality cost and speed of the step cache, measured against sampling without it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from strata.serving.diffusion.parallel.group import ALONE, Group
from strata.serving.diffusion.pipeline import Pipeline
from strata.serving.diffusion.sampling import Picture, sample
from strata.serving.diffusion.step_cache import StepCache

WINDOW = 7  # pixels of a side of SSIM's windows


@dataclass(frozen=True)
class CacheCost:
    """Sampling with a threshold. PSNR in dB and SSIM are means over the pictures; infinite and 1 for equal ones."""

    threshold: float
    seconds: float
    seconds_without: float
    skipped: float  # share of the evaluations of the blocks after the first
    psnr: float
    ssim: float


def step_cache_costs(
    pipeline: Pipeline, pictures: Sequence[Picture], thresholds: Sequence[float], rounds: int = 1, workers: Group = ALONE
) -> list[CacheCost]:
    """One batch of pictures without the cache and with each threshold, in turns; the times are the shortest of `rounds`. The
    first calls are not counted."""
    caches = [StepCache(threshold) for threshold in thresholds]
    reference = sample(pipeline, pictures, workers=workers)
    found = [sample(pipeline, pictures, workers=workers, step_cache=cache) for cache in caches]
    without, seconds = float("inf"), [float("inf")] * len(caches)
    for _ in range(rounds):
        without = min(without, _timed(pipeline, pictures, workers, None))
        for i, cache in enumerate(caches):
            seconds[i] = min(seconds[i], _timed(pipeline, pictures, workers, cache))
    return [
        CacheCost(
            threshold=cache.threshold,
            seconds=seconds[i],
            seconds_without=without,
            skipped=cache.skipped / (cache.skipped + cache.computed),
            psnr=float(np.mean([psnr(a, b) for a, b in zip(found[i], reference, strict=True)])),
            ssim=float(np.mean([ssim(a, b) for a, b in zip(found[i], reference, strict=True)])),
        )
        for i, cache in enumerate(caches)
    ]


def _timed(pipeline: Pipeline, pictures: Sequence[Picture], workers: Group, cache: StepCache | None) -> float:
    """The pictures arrive on the CPU, so the GPU has finished."""
    start = time.perf_counter()
    sample(pipeline, pictures, workers=workers, step_cache=cache)
    return time.perf_counter() - start


def psnr(picture: np.ndarray, reference: np.ndarray) -> float:
    """Peak signal-to-noise ratio of 8-bit pictures, in dB."""
    error = float(np.mean((picture.astype(np.float64) - reference.astype(np.float64)) ** 2))
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def ssim(picture: np.ndarray, reference: np.ndarray) -> float:
    """Structural similarity of 8-bit pictures [height, width, 3]: the mean over channels and square windows of one weight."""
    x, y = (torch.from_numpy(p.astype(np.float64)).permute(2, 0, 1)[None] for p in (picture, reference))
    window = min(WINDOW, *picture.shape[:2])
    mean_x, mean_y, xx, yy, xy = (F.avg_pool2d(z, window, stride=1) for z in (x, y, x * x, y * y, x * y))
    unbiased = window**2 / (window**2 - 1) if window > 1 else 1.0
    var_x, var_y, cov = ((a - b) * unbiased for a, b in ((xx, mean_x**2), (yy, mean_y**2), (xy, mean_x * mean_y)))
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    structure = (2 * mean_x * mean_y + c1) * (2 * cov + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return float(structure.mean())
