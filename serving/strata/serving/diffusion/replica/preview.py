"""Partial pictures: the picture that a batch would become if the model's last prediction were exact.

Latents in the middle of sampling are mostly noise. Under flow matching they lie on a line from the noise to the picture, and two
of them in a row give its end. Other schedulers' latents are shown as they are.
"""

import numpy as np
import torch

from strata.serving.diffusion.denoiser import Batch as Shape
from strata.serving.diffusion.families import Condition
from strata.serving.diffusion.pipeline import Conditions, Pipeline
from strata.serving.diffusion.replica.messages import Batch
from strata.serving.diffusion.sampling import Latents, decode, schedule, to_pictures


class Preview:
    def __init__(self, pipeline: Pipeline, batch: Batch) -> None:
        self._pipeline, self._wanted = pipeline, batch.partials
        first = batch.pictures[0]
        empty = torch.zeros(0)
        # The schedule depends on size and steps alone.
        shape = Shape(Conditions(Condition(), Condition()), empty, empty, first.height, first.width, first.steps)
        scheduler = schedule(pipeline, shape)
        self._sigmas = scheduler.sigmas if type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler" else None
        self._before: Latents | None = None

    def after(self, step: int, latents: Latents) -> dict[int, np.ndarray]:
        """Pictures that are wanted after this step, by their place in the batch."""
        places = self._wanted.get(step, ())
        shown = self._end(step, latents)[list(places)] if places else None
        self._before = latents if step + 1 in self._wanted else None
        if shown is None:
            return {}
        return dict(zip(places, to_pictures(decode(self._pipeline, shown)), strict=True))

    def _end(self, step: int, latents: Latents) -> Latents:
        if self._sigmas is None or self._before is None:
            return latents
        before, now = self._sigmas[step - 1], self._sigmas[step]
        ended: Latents = latents - now * (latents - self._before) / (now - before)
        return ended
