"""Diffusion transformers with random weights: published shapes for a GPU, and inputs for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from strata.serving.diffusion.families import FAMILIES, Condition, Family

LATENT = 8  # pixels per latent pixel of every model here
LAYERS = ("num_layers", "num_single_layers")


@dataclass(frozen=True)
class PictureModel:
    """A transformer by its diffusers class and config, and the picture to sample. `text` is the number of text tokens."""

    name: str
    transformer: str
    config: Mapping[str, Any] = field(repr=False)
    size: int
    steps: int
    guidance: float
    text: int = 0

    @property
    def family(self) -> Family:
        return FAMILIES[self.transformer]

    @property
    def guided(self) -> bool:
        """True if a step runs the model twice, with and without the prompt."""
        return not self.family.distilled_guidance and self.guidance > 1

    def shallow(self) -> "PictureModel":
        """The same blocks, but two of each kind: they compile to the same code."""
        return replace(self, config={**self.config, **{key: 2 for key in LAYERS if key in self.config}})

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        import diffusers

        with torch.device(device):
            transformer: nn.Module = getattr(diffusers, self.transformer)(**self.config)
        return transformer.to(device, dtype).eval().requires_grad_(False)

    def condition(self, device: torch.device, dtype: torch.dtype, rows: int, seed: int) -> Condition:
        """Random text states, or a class; the same for every row."""
        if not self.text:
            return Condition(labels=torch.full((rows,), 1, device=device))
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(1, *shape, generator=generator).repeat_interleave(rows, 0).to(device, dtype)

        text = normal(self.text, self.config.get("joint_attention_dim") or self.config["caption_channels"])
        if "pooled_projection_dim" in self.config:
            return Condition(text=text, pooled=normal(self.config["pooled_projection_dim"]))
        return Condition(text=text, mask=torch.ones(rows, self.text, device=device))


# The transformers' config.json on the Hub: black-forest-labs/FLUX.1-dev, stabilityai/stable-diffusion-3-medium-diffusers,
# PixArt-alpha/PixArt-XL-2-1024-MS, facebook/DiT-XL-2-512. Steps and guidance are the defaults of diffusers' pipelines.
FULL_SIZE = (
    PictureModel(
        "FLUX.1-dev 1024px",
        "FluxTransformer2DModel",
        {
            "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
            "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
            "axes_dims_rope": (16, 56, 56),
        },
        size=1024, steps=28, guidance=3.5, text=512,
    ),
    PictureModel(
        "SD3-medium 1024px",
        "SD3Transformer2DModel",
        {
            "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 24, "attention_head_dim": 64,
            "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048, "out_channels": 16, "pos_embed_max_size": 192,
        },
        size=1024, steps=28, guidance=7.0, text=333,
    ),
    PictureModel(
        "PixArt-alpha 1024px",
        "PixArtTransformer2DModel",
        {
            "sample_size": 128, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_layers": 28,
            "num_attention_heads": 16, "attention_head_dim": 72, "cross_attention_dim": 1152, "caption_channels": 4096,
        },
        size=1024, steps=20, guidance=4.5, text=120,
    ),
    PictureModel(
        "DiT-XL/2 512px",
        "DiTTransformer2DModel",
        {
            "sample_size": 64, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_layers": 28,
            "num_attention_heads": 16, "attention_head_dim": 72, "num_embeds_ada_norm": 1000,
        },
        size=512, steps=25, guidance=4.0,
    ),
)  # fmt: skip
# For the laptop: seconds per picture on two cores.
SMALL = PictureModel(
    "SD3, 8 blocks of 192",
    "SD3Transformer2DModel",
    {
        "sample_size": 32, "patch_size": 2, "in_channels": 16, "num_layers": 8, "attention_head_dim": 24,
        "num_attention_heads": 8, "joint_attention_dim": 128, "caption_projection_dim": 192, "pooled_projection_dim": 128,
        "out_channels": 16, "pos_embed_max_size": 32,
    },
    size=256, steps=6, guidance=4.0, text=16,
)  # fmt: skip
