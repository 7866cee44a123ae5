"""Projections of all steps at once give the latents of projections step by step. A stand-in runs what a graph would replay."""

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.serving.diffusion.pipeline import Pipeline, load_pipeline
from strata.serving.diffusion.sampling import Picture, sample_latents
from strata.serving.diffusion.step_cache import StepCache
from strata.serving.diffusion.step_modulations import StepModulations


class Replayed:
    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self.modulations: StepModulations | None = None

    def run(self, forward: Any, tokens: Any, modulation: Any) -> torch.Tensor:
        if self.modulations:
            self.addresses.add(self.modulations._selected.data_ptr())
        return forward(tokens, modulation)


def pictures(count: int, guidance: float = 3.0) -> list[Picture]:
    prompts = ["a red circle", "two small green square"]
    return [Picture(prompts[i], seed=i, width=32, height=32, steps=3, guidance=guidance) for i in range(count)]


@pytest.mark.parametrize(("family", "prepared"), [("own", True), ("sd3", True), ("flux", True), ("pixart", False)])
def test_latents_are_the_same(family: str, prepared: bool, picture_models: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    plain = load_pipeline(picture_models[family])
    pipeline: Pipeline = load_pipeline(picture_models[family])
    graphs = Replayed()
    pipeline.graphs, pipeline.modulations = graphs, StepModulations(pipeline.transformer)  # type: ignore[assignment]
    graphs.modulations = pipeline.modulations
    assert bool(pipeline.modulations) == prepared
    with torch.inference_mode():
        for count, guidance in ((1, 3.0), (2, 3.0), (1, 3.0), (2, 1.0)):
            wanted = pictures(count, guidance)
            torch.testing.assert_close(sample_latents(pipeline, wanted), sample_latents(plain, wanted), atol=2e-5, rtol=1e-4)
        # One buffer for each number of rows: graphs of other batches still read theirs.
        assert len(graphs.addresses) == (2 if prepared else 0)
        # A call that cannot use the graphs computes its projections step by step.
        wanted = pictures(2)
        cached = sample_latents(pipeline, wanted, step_cache=StepCache(0.0))
        torch.testing.assert_close(cached, sample_latents(plain, wanted), atol=2e-5, rtol=1e-4)
