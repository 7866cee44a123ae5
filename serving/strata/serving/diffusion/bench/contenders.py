"""Ways to sample a picture from the same weights: diffusers, diffusers with torch.compile, and Strata.

The autoencoder and the text encoders are left out: all would run the same ones. DiT's pipeline has no way around the
autoencoder; a small random one stands in for it.
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strata.serving.diffusion.bench.models import LATENT, PictureModel

if TYPE_CHECKING:
    from strata.serving.diffusion.sampling import Picture

Run = Callable[[int, int], Tensor]  # (steps, pictures of a batch) -> latents or pixels
NAMES = DIFFUSERS, COMPILED, OURS = "diffusers", "diffusers + torch.compile", "strata"
SEED = 7


def contender(name: str, model: PictureModel, transformer: nn.Module) -> Run:
    """A contender with modules of its own around the shared weights."""
    transformer = sharing_weights(transformer)
    if name == OURS:
        return _strata(model, transformer)
    if name == COMPILED:
        compile_blocks(transformer)
    return _diffusers(model, transformer)


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of the modules with the same parameters and buffers: one model may be compiled and the other not."""
    memo = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, memo)


def compile_blocks(transformer: Any) -> None:
    """Regional compilation, as diffusers recommends: one graph for all blocks of a kind."""
    if getattr(transformer, "_repeated_blocks", None):
        transformer.compile_repeated_blocks(fullgraph=True)
    else:
        for block in transformer.transformer_blocks:
            block.compile(fullgraph=True)


def scheduler_of(model: PictureModel) -> Any:
    import diffusers

    match model.family.name:
        case "flux":
            return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
        case "sd3":
            return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        case "pixart":
            return diffusers.DPMSolverMultistepScheduler()
        case _:
            return diffusers.DDIMScheduler()


def _strata(model: PictureModel, transformer: Any) -> Run:
    from strata.serving.diffusion.pipeline import Pipeline
    from strata.serving.diffusion.sampling import sample_latents

    vae = stand_in_vae(transformer)  # the size in pixels is an input of some models
    pipeline = Pipeline(model.family, transformer, scheduler_of(model), vae, partial(encode, model, transformer))
    for block in model.family.blocks(transformer):
        block.compile(fullgraph=True, dynamic=False)
    if transformer.device.type == "cuda":
        pipeline.use_graphs()

    def run(steps: int, batch: int) -> Tensor:
        with torch.inference_mode():
            latents = sample_latents(pipeline, pictures(model, steps, batch, latent=False))
            if model.family.name != "dit":
                return latents
            return vae.decode(pipeline.decode_scaled(latents).to(vae.dtype)).sample  # type: ignore[no-any-return]

    return run


def pictures(model: PictureModel, steps: int, batch: int, latent: bool = True) -> "list[Picture]":
    """Pictures of one batch. Without an autoencoder (`latent`), the pipeline counts sizes in latent pixels."""
    from strata.serving.diffusion.sampling import Picture

    side = model.size // LATENT if latent else model.size
    options = {"width": side, "height": side, "steps": steps, "guidance": model.guidance}
    return [Picture("", seed=SEED + number, **options) for number in range(batch)]  # type: ignore[arg-type]


def encode(model: PictureModel, transformer: Any, prompts: Any) -> Any:
    return model.condition(transformer.device, transformer.dtype, len(prompts), SEED)


def _diffusers(model: PictureModel, transformer: Any) -> Run:
    import diffusers

    scheduler, device, dtype = scheduler_of(model), transformer.device, transformer.dtype
    text = model.condition(device, dtype, 1, SEED)
    options: dict[str, Any] = {"guidance_scale": model.guidance, "return_dict": False}
    if model.family.name != "dit":
        options |= {"height": model.size, "width": model.size, "output_type": "latent"}
    match model.family.name:
        case "flux":
            pipeline = diffusers.FluxPipeline(scheduler, None, None, None, None, None, transformer)
            options |= {"prompt_embeds": text.text, "pooled_prompt_embeds": text.pooled}
        case "sd3":
            pipeline = diffusers.StableDiffusion3Pipeline(transformer, scheduler, None, None, None, None, None, None, None)
            options |= {"prompt_embeds": text.text, "pooled_prompt_embeds": text.pooled}
            options |= {"negative_prompt_embeds": text.text, "negative_pooled_prompt_embeds": text.pooled}
        case "pixart":
            pipeline = diffusers.PixArtAlphaPipeline(None, None, None, transformer, scheduler)
            options |= {"prompt_embeds": text.text, "prompt_attention_mask": text.mask, "negative_prompt": None}
            options |= {"negative_prompt_embeds": text.text, "negative_prompt_attention_mask": text.mask}
            options |= {"use_resolution_binning": False}
        case _:
            pipeline = diffusers.DiTPipeline(transformer, stand_in_vae(transformer), scheduler)
            options |= {"output_type": "pt"}
    pipeline.set_progress_bar_config(disable=True)

    def run(steps: int, batch: int) -> Tensor:
        given = dict(options)
        if model.family.name == "dit":
            given |= {"class_labels": [1] * batch, "generator": torch.Generator().manual_seed(SEED)}
        else:
            given |= {name: rows.repeat_interleave(batch, 0) for name, rows in given.items() if isinstance(rows, Tensor)}
            given["latents"] = _noise(model, pipeline, device, dtype, batch)
        return pipeline(num_inference_steps=steps, **given)[0]  # type: ignore[no-any-return]

    return run


def _noise(model: PictureModel, pipeline: Any, device: torch.device, dtype: torch.dtype, batch: int) -> Tensor:
    """The noise that Strata draws from the seeds, packed as diffusers' FLUX takes it."""
    side, channels = model.size // LATENT, model.family.channels(pipeline.transformer)
    generators = [torch.Generator().manual_seed(SEED + number) for number in range(batch)]
    noise = torch.stack([torch.randn(channels, side, side, generator=one) for one in generators]).to(device, dtype)
    return pipeline._pack_latents(noise, batch, channels, side, side) if model.family.name == "flux" else noise


def stand_in_vae(transformer: Any) -> Any:
    import diffusers

    torch.manual_seed(SEED)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = diffusers.AutoencoderKL(block_out_channels=(32,) * 4, latent_channels=4, layers_per_block=1, **kinds)
    return vae.to(transformer.device, transformer.dtype).eval().requires_grad_(False)


def comparable(model: PictureModel, output: Tensor) -> Tensor:
    """Latents [b, channels, height, width] of any contender."""
    if model.family.name != "flux" or output.dim() == 4:
        return output.float()
    side = model.size // LATENT // 2
    packed = output.reshape(len(output), side, side, -1, 2, 2)
    return torch.einsum("nhwcpq->nchpwq", packed).flatten(4, 5).flatten(2, 3).float()
