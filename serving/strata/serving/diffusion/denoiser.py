"""One evaluation of the transformer for a batch: guidance passes, blocks, and this worker's share of both."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from strata.serving.diffusion.families import Condition, Modulation, Tokens, joined
from strata.serving.diffusion.parallel.group import Group
from strata.serving.diffusion.parallel.sequence import SequenceAttention, gather, share
from strata.serving.diffusion.pipeline import Conditions, Pipeline
from strata.serving.diffusion.step_cache import StepCache


@dataclass(frozen=True)
class Batch:
    """Pictures of one size and number of steps."""

    conditions: Conditions
    scale: Tensor  # [b], classifier-free guidance; up to 1: off
    guidance: Tensor  # [b], input of models with distilled guidance
    height: int
    width: int
    steps: int


class Denoiser:
    """Predictions of a transformer for one sampling call."""

    def __init__(self, pipeline: Pipeline, batch: Batch, workers: Group, cache: StepCache | None = None) -> None:
        self.pipeline, self.batch, self.workers, self.cache = pipeline, batch, workers, cache
        self.family, self.model = pipeline.family, pipeline.transformer
        self.grid = pipeline.grid(batch.height, batch.width)
        self.image = self.grid[0] * self.grid[1]  # tokens
        self.guided = bool((batch.scale > 1).any())
        halves = [batch.conditions.negative, batch.conditions.positive]
        if not self.guided:
            mine = halves[1:]  # with cfg=2, both workers then do the same
        elif workers.cfg.size == 2:
            mine = [halves[workers.cfg.index]]
        else:
            mine = halves
        self.passes = len(mine)  # on this worker
        self.condition: Condition = without_void_mask(joined(mine))
        text = self.condition.text
        self.text = text.shape[1] if self.family.joint_text and text is not None else 0  # tokens
        self.attend = SequenceAttention(workers, self.image, self.text) if workers.sequence.size > 1 else pipeline.seam.attend
        if cache is not None:
            cache.begin(len(batch.scale), workers.everyone)
        self.graphs = pipeline.graphs if cache is None and workers.sequence.size == workers.stages.size == 1 else None
        self.steps: dict[float, int] = {}  # times whose projections are prepared
        if pipeline.modulations is not None:
            pipeline.modulations.clear()

    def prepare(self, timesteps: Tensor) -> None:
        """Computes what depends on the times alone. Optional: `predict` computes it otherwise."""
        modulations = self.pipeline.modulations
        if self.graphs is None or not modulations:
            return
        rows = len(self.batch.scale) * self.passes
        every = torch.arange(rows, device=self.model.device).repeat(len(timesteps))
        self.all_steps = self._modulation(timesteps.repeat_interleave(rows), self.condition.rows(every), len(timesteps))
        modulations.prepare(torch.unflatten(self.all_steps.time, 0, (-1, rows)))
        self.steps = {float(time): step for step, time in enumerate(timesteps)}

    def predict(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Guided prediction for scaled latents [b, channels, height, width]."""
        image, text = share(self.image, self.workers.sequence), share(self.text, self.workers.sequence)
        tokens = self.tokens(latents, image, text)
        modulation = self.modulation(timestep).of_tokens(image, text)
        with self.pipeline.seam.using(self.attend):
            values = self.graphs.run(self.forward, tokens, modulation) if self.graphs else self.forward(tokens, modulation)
        values = self.combine(values)
        values = gather(values, self.workers.sequence, self.image, dim=1)
        return self.family.latents(self.model, values, self.grid[1])

    def tokens(self, latents: Tensor, image: slice, text: slice) -> Tokens:
        """Embedded tokens of a range of the image and of the text."""
        inputs = latents.to(self.model.dtype).repeat(self.passes, 1, 1, 1)
        tokens = self.family.tokens(self.model, inputs, self.condition)
        # Contiguous, as the outputs of blocks are: compiled blocks would otherwise have a second graph for the first one.
        return Tokens(tokens.image[:, image].contiguous(), None if tokens.text is None else tokens.text[:, text].contiguous())

    def modulation(self, timestep: Tensor) -> Modulation:
        rows = len(self.batch.scale) * self.passes
        if (step := self.steps.get(float(timestep))) is None:
            return self._modulation(timestep.expand(rows), self.condition, 1)
        assert self.pipeline.modulations is not None
        self.pipeline.modulations.select(step)
        return self.all_steps.rows(slice(step * rows, (step + 1) * rows))

    def _modulation(self, times: Tensor, condition: Condition, steps: int) -> Modulation:
        guidance = self.batch.guidance.repeat(self.passes * steps)
        size = (self.batch.height, self.batch.width)
        return self.family.modulation(self.model, times.to(self.model.device), condition, guidance, self.grid, size)

    def forward(self, tokens: Tokens, modulation: Modulation) -> Tensor:
        """Blocks and head."""
        return self.family.head(self.model, self.run_blocks(tokens, modulation).image, modulation)

    def run_blocks(self, tokens: Tokens, modulation: Modulation) -> Tokens:
        blocks = self.family.blocks(self.model)
        if self.cache is not None:
            return self.cache.run(self.family, blocks, tokens, modulation)
        for block in blocks:
            tokens = self.family.block(block, tokens, modulation)
        return tokens

    def combine(self, values: Tensor) -> Tensor:
        """Classifier-free guidance of head values [rows, tokens, channels], in fp32. Pictures without it take their conditional
        half unchanged."""
        values = values.float()
        if not self.guided:
            return values
        if self.workers.cfg.size == 2:
            halves = [torch.empty_like(values) for _ in range(2)]
            dist.all_gather(halves, values.contiguous(), group=self.workers.cfg.group)
        else:
            halves = list(values.chunk(2))
        negative, positive = halves
        scale = self.batch.scale.view(-1, 1, 1)
        return torch.where(scale > 1, negative + scale * (positive - negative), positive)


def without_void_mask(condition: Condition) -> Condition:
    """A mask that hides nothing would keep cross attention from the flash attention, which has none."""
    if condition.mask is None or not bool(condition.mask.all()):
        return condition
    return replace(condition, mask=None)
