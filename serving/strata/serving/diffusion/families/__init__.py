"""Families of diffusion transformers, by the class of their transformer in `diffusers`."""

from strata.serving.diffusion.families.dit import DiT
from strata.serving.diffusion.families.family import Condition, Family, Modulation, Rows, Tokens, joined
from strata.serving.diffusion.families.flux import Flux
from strata.serving.diffusion.families.pixart import PixArt
from strata.serving.diffusion.families.sd3 import SD3

FAMILIES: dict[str, Family] = {
    "SD3Transformer2DModel": SD3(),
    "FluxTransformer2DModel": Flux(),
    "PixArtTransformer2DModel": PixArt(),
    "DiTTransformer2DModel": DiT(),
}

__all__ = ["FAMILIES", "SD3", "Condition", "DiT", "Family", "Flux", "Modulation", "PixArt", "Rows", "Tokens", "joined"]
