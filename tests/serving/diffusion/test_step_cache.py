"""The step cache in one process, and the measure of its cost."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from strata.serving.diffusion.cache_cost import psnr, ssim, step_cache_costs
from strata.serving.diffusion.pipeline import Pipeline, load_pipeline
from strata.serving.diffusion.sampling import Picture, sample_latents
from strata.serving.diffusion.step_cache import StepCache

PICTURES = [
    Picture("a red circle", steps=8, seed=1, width=16, height=16),
    Picture("two blue", steps=8, seed=2, width=16, height=16, guidance=1.5),
]


@pytest.fixture(scope="module")
def own(picture_models: dict[str, Path]) -> Pipeline:
    torch.set_num_threads(1)
    return load_pipeline(picture_models["own"])


def latents(pipeline: Pipeline, pictures: list[Picture], cache: StepCache | None) -> torch.Tensor:
    with torch.inference_mode():
        return sample_latents(pipeline, pictures, step_cache=cache).clone()


def test_a_threshold_of_zero_changes_nothing(own: Pipeline) -> None:
    cache = StepCache(0.0)
    assert torch.equal(latents(own, PICTURES, cache), latents(own, PICTURES, None))
    assert (cache.computed, cache.skipped) == (16, 0)


def test_a_large_threshold_computes_the_first_step_only(own: Pipeline) -> None:
    cache = StepCache(1e9)
    exact = latents(own, PICTURES, None)
    assert (cache.computed, cache.skipped) == (0, 0)
    assert not torch.allclose(latents(own, PICTURES, cache), exact, atol=1e-2)
    assert (cache.computed, cache.skipped) == (2, 14)
    one_step = [Picture(**(p.__dict__ | {"steps": 1})) for p in PICTURES]
    assert torch.equal(latents(own, one_step, cache), latents(own, one_step, None)), "nothing is left of an earlier call"


def test_pictures_decide_for_themselves(own: Pipeline) -> None:
    """Each picture of a batch is the one that it is alone, also where they skip different steps."""
    threshold = 0.6
    alone = []
    for picture in PICTURES:
        cache = StepCache(threshold)
        alone.append((latents(own, [picture], cache)[0], cache.computed))
    cache = StepCache(threshold)
    together = latents(own, PICTURES, cache)
    counts = [computed for _, computed in alone]
    assert counts[0] != counts[1] and min(counts) > 1 and sum(counts) == cache.computed < 16
    for ours, (expected, _) in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_more_is_skipped_at_higher_thresholds_and_quality_falls(own: Pipeline) -> None:
    none, some, most = step_cache_costs(own, PICTURES, [0.0, 0.6, 1e9])
    assert (none.skipped, none.psnr, none.ssim) == (0.0, math.inf, pytest.approx(1.0))
    assert 0 < some.skipped < most.skipped == 14 / 16
    assert math.inf > some.psnr > most.psnr
    assert 1 > some.ssim > most.ssim
    assert all(cost.seconds > 0 and cost.seconds_without > 0 for cost in (none, some, most))


def test_psnr_and_ssim() -> None:
    a = np.random.default_rng(0).integers(0, 255, (16, 20, 3)).astype(np.uint8)
    off_by_one = (a + 1).astype(np.uint8)
    assert psnr(a, a) == math.inf
    assert psnr(off_by_one, a) == pytest.approx(20 * math.log10(255))
    assert ssim(a, a) == pytest.approx(1.0)
    flat, brighter = np.full_like(a, 100), np.full_like(a, 120)
    c1 = (0.01 * 255) ** 2
    assert ssim(flat, brighter) == pytest.approx((2 * 100 * 120 + c1) / (100**2 + 120**2 + c1))
    assert ssim(a, 255 - a) < 0


@pytest.mark.slow
def test_blocks_of_one_kind_share_a_compiled_graph(picture_models: dict[str, Path]) -> None:
    pipeline = load_pipeline(picture_models["dit"])
    picture = [Picture("3", steps=2)]
    expected = latents(pipeline, picture, None)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    for block in pipeline.family.blocks(pipeline.transformer):
        block.compile(backend=counter, dynamic=False)
    torch.testing.assert_close(latents(pipeline, picture, None), expected)
    assert counter.frame_count == 1
