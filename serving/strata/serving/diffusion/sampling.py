"""Sampling of pictures: noise, steps of the scheduler, guidance, and decoding, by one worker or by a group of them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strata.platform.errors import UserError
from strata.serving.diffusion.denoiser import Batch, Denoiser
from strata.serving.diffusion.parallel import vae
from strata.serving.diffusion.parallel.group import ALONE, Group, check_layout
from strata.serving.diffusion.parallel.pipefusion import PatchPipeline
from strata.serving.diffusion.pipeline import Pipeline
from strata.serving.diffusion.step_cache import StepCache

Latents = Tensor  # fp32 [b, channels, height, width]
OnStep = Callable[[int, int, Latents], bool]


class Cancelled(Exception):
    """`on_step` has ended a sampling call."""


@dataclass(frozen=True)
class Picture:
    """One picture of a batch. A `width` or `height` of 0 is the model's own."""

    prompt: str
    negative: str = ""
    width: int = 0
    height: int = 0
    steps: int = 20
    guidance: float = 4.0
    seed: int = 0
    true_cfg: float = 1.0  # classifier-free guidance of models that have guidance as an input (FLUX)


def sample(
    pipeline: Pipeline,
    pictures: Sequence[Picture],
    on_step: OnStep | None = None,
    workers: Group = ALONE,
    step_cache: StepCache | None = None,
) -> list[np.ndarray]:
    """Pictures as uint8 [height, width, 3], on every worker. All workers of a group call this with the same pictures, which have
    one size and number of steps. Worker 0's `on_step(step, steps, latents)` is called after every step, from step 1; False
    raises `Cancelled` on all workers. The noise of a picture depends on its seed alone."""
    with torch.inference_mode():
        latents = sample_latents(pipeline, pictures, on_step, workers, step_cache)
        return to_pictures(decode(pipeline, latents, workers))


def sample_latents(
    pipeline: Pipeline,
    pictures: Sequence[Picture],
    on_step: OnStep | None = None,
    workers: Group = ALONE,
    step_cache: StepCache | None = None,
) -> Latents:
    """The latents before decoding."""
    batch = prepare(pipeline, pictures)
    check_batch(pipeline, batch, workers, step_cache)
    scheduler = schedule(pipeline, batch)
    latents = noise(pipeline, pictures, batch) * getattr(scheduler, "init_noise_sigma", 1.0)
    denoiser = Denoiser(pipeline, batch, workers, step_cache)
    if workers.stages.size > 1:
        return by_patches(PatchPipeline(denoiser, scheduler, latents, workers), on_step)
    steps = len(scheduler.timesteps)
    denoiser.prepare(scheduler.timesteps)
    for step, timestep in enumerate(scheduler.timesteps, start=1):
        prediction = denoiser.predict(model_input(scheduler, latents, timestep), timestep)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
        if (reason := ended(on_step, step, steps, latents, workers)) is not None:
            raise reason
    return latents


def by_patches(pipeline: PatchPipeline, on_step: OnStep | None) -> Latents:
    """All steps of a patch pipeline. The steps of patches overlap: worker 0 has the latents of a step, and reports them, at the
    end of its next one."""
    workers, timesteps = pipeline.workers, pipeline.fresh.timesteps
    steps = len(timesteps)
    warm_up = min(max(workers.warm_up, 1), steps)  # the first step has no previous one
    for step, timestep in enumerate(timesteps, start=1):
        reported = step if step <= warm_up else step - 1
        if step <= warm_up:
            pipeline.exact_step(timestep)
        else:
            pipeline.patch_step(timestep, follows_patches=reported > warm_up)
        if step != warm_up + 1 and (reason := ended(on_step, reported, steps, pipeline.latents.clone(), workers)) is not None:
            if step > warm_up:
                pipeline.drain()
            raise reason
    if warm_up < steps:
        pipeline.drain()
        if (reason := ended(on_step, steps, steps, pipeline.latents.clone(), workers)) is not None:
            raise reason
        pipeline.share_latents()
    return pipeline.latents


def ended(on_step: OnStep | None, step: int, steps: int, latents: Latents, workers: Group) -> BaseException | None:
    """The exception with which all workers end after this step: worker 0's own if its `on_step` raised one."""
    raised: BaseException | None = None

    def go_on() -> bool:
        nonlocal raised
        try:
            return on_step is None or on_step(step, steps, latents)
        except BaseException as e:  # the other workers must not wait for this one
            raised = e
            return False

    if workers.agree(go_on):
        return None
    return raised or Cancelled(f"cancelled after step {step} of {steps}")


def check_batch(pipeline: Pipeline, batch: Batch, workers: Group, step_cache: StepCache | None) -> None:
    """Refuse what a layout does not do for this model and size. Guidance that is off leaves a cfg layout idle, not wrong."""
    check_layout(workers.layout, pipeline.heads, pipeline.blocks, pipeline.grid(batch.height, batch.width), two_passes=True)
    if step_cache is not None and workers.stages.size > 1:
        raise UserError("The step cache needs all blocks on one worker.", "Use it without pipefusion.")


def prepare(pipeline: Pipeline, pictures: Sequence[Picture]) -> Batch:
    """Sizes, conditions and guidance of a batch."""
    shapes = {(p.height or pipeline.own_size[0], p.width or pipeline.own_size[1], p.steps) for p in pictures}
    if len(shapes) != 1:
        raise UserError(f"A batch has one size and number of steps, not {len(shapes)}.", "Sample them one after another.")
    height, width, steps = shapes.pop()
    if steps < 1:
        raise UserError(f"{steps} steps give no picture.", "Use at least 1 step.")
    pipeline.check_size(height, width)
    distilled = pipeline.family.distilled_guidance
    return Batch(
        conditions=pipeline.encode([p.prompt for p in pictures], [p.negative for p in pictures]),
        scale=torch.tensor([p.true_cfg if distilled else p.guidance for p in pictures], device=pipeline.transformer.device),
        guidance=torch.tensor([p.guidance for p in pictures], device=pipeline.transformer.device),
        height=height,
        width=width,
        steps=steps,
    )


def noise(pipeline: Pipeline, pictures: Sequence[Picture], batch: Batch) -> Latents:
    """Seeded on the CPU, so that a seed is the same picture on every device and in every batch."""
    channels = pipeline.family.channels(pipeline.transformer)
    shape = (channels, batch.height // pipeline.vae_factor, batch.width // pipeline.vae_factor)
    rows = [torch.randn(shape, generator=torch.Generator().manual_seed(p.seed)) for p in pictures]
    return torch.stack(rows).to(pipeline.transformer.device)


def schedule(pipeline: Pipeline, batch: Batch) -> Any:
    """A scheduler of its own for this call: schedulers have a state. Its times are on the CPU: schedulers look up tables by them,
    and a lookup by a time on the GPU would wait for all steps before it."""
    scheduler = copy.deepcopy(pipeline.scheduler)
    options: dict[str, Any] = {}
    config = scheduler.config
    if config.get("use_dynamic_shifting"):
        rows, columns = pipeline.grid(batch.height, batch.width)
        short, long = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", pipeline.family.max_shift)
        options["mu"] = low + (high - low) * (rows * columns - short) / (long - short)
    if (sigmas := pipeline.family.scheduler_sigmas(batch.steps)) is not None and not config.get("use_flow_sigmas"):
        options["sigmas"] = sigmas
    scheduler.set_timesteps(batch.steps, device="cpu", **options)
    return scheduler


def model_input(scheduler: Any, latents: Latents, timestep: Tensor) -> Latents:
    """Latents as the model takes them; flow matching takes them as they are."""
    return scheduler.scale_model_input(latents, timestep) if hasattr(scheduler, "init_noise_sigma") else latents


def decode(pipeline: Pipeline, latents: Latents, workers: Group = ALONE) -> Tensor:
    """Latents to pixels in [-1, 1], [b, 3, height, width]."""
    if pipeline.vae is None:
        return latents
    scaled = pipeline.decode_scaled(latents).to(pipeline.vae.dtype)
    if vae.splits(pipeline.vae, scaled.shape[2], workers.everyone):
        return vae.decode(pipeline.vae, scaled, workers.everyone)
    return pipeline.vae.decode(scaled).sample  # type: ignore[no-any-return]


def to_pictures(pixels: Tensor) -> list[np.ndarray]:
    scaled = ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    return list(scaled.permute(0, 2, 3, 1).cpu().numpy())
