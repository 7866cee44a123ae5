"""Pictures from captions by Euler steps along the learned velocity, with classifier-free guidance."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.platform.recipe import CHANNELS
from strata.training.data.sampler import Indices
from strata.training.diffusion.model import PictureModel

BATCH = 64  # pictures at a time


@torch.no_grad()
def sample(
    model: PictureModel, captions: Indices, empty: Indices, seeds: Sequence[int], steps: int, guidance: float
) -> list[NDArray[np.uint8]]:
    """A picture of [size, size, 3] for each caption. `captions` and `empty`, the empty caption, are token ids. A picture's noise
    depends on its seed alone, and is the same that serving draws for this seed."""
    device = next(model.parameters()).device
    found: list[NDArray[np.uint8]] = []
    for begin in range(0, len(captions), BATCH):
        some = slice(begin, begin + BATCH)
        tokens_bt = torch.from_numpy(captions[some]).to(device)
        nothing_bt = torch.from_numpy(empty).to(device).expand_as(tokens_bt)
        found += _pictures(_denoised(model, tokens_bt, nothing_bt, seeds[some], steps, guidance))
    return found


def _denoised(
    model: PictureModel, tokens_bt: Tensor, nothing_bt: Tensor, seeds: Sequence[int], steps: int, guidance: float
) -> Tensor:
    from diffusers import FlowMatchEulerDiscreteScheduler

    size = model.transformer.config.sample_size
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps)
    guided = guidance != 1
    text, pooled = model.encode(torch.cat([tokens_bt, nothing_bt]) if guided else tokens_bt)
    noise = [torch.randn((CHANNELS, size, size), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    x = torch.stack(noise).to(tokens_bt.device)
    for timestep in scheduler.timesteps:
        twice = torch.cat([x, x]) if guided else x
        velocity = model.transformer(
            hidden_states=twice.to(text.dtype),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=timestep.to(x.device).expand(len(twice)),
        ).sample.float()
        if guided:
            with_caption, without = velocity.chunk(2)
            velocity = without + guidance * (with_caption - without)
        x = scheduler.step(velocity, timestep, x).prev_sample
    return x


def _pictures(pixels: Tensor) -> list[NDArray[np.uint8]]:
    bytes_bhwc = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    return list(bytes_bhwc.cpu().numpy())
