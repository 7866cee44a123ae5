"""PixArt (alpha and sigma): self-attention over image tokens, cross attention to masked text, one shared adaptive norm."""

from typing import Any

import torch
from torch import Tensor, nn

from strata.serving.diffusion.families.family import Condition, Family, Modulation, Tokens

MASKED = -10000.0  # diffusers' own bias for tokens that are not attended to


class PixArt(Family):
    name = "pixart"

    def tokens(self, model: Any, latents: Tensor, condition: Condition) -> Tokens:
        return Tokens(model.pos_embed(latents))

    def modulation(
        self, model: Any, timestep: Tensor, condition: Condition, guidance: Tensor, grid: tuple[int, int], size: tuple[int, int]
    ) -> Modulation:
        assert condition.text is not None
        b, dtype = len(timestep), condition.text.dtype
        added: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
        if model.use_additional_conditions:
            height, width = size
            added = {
                "resolution": torch.tensor([[height, width]] * b, dtype=dtype, device=timestep.device),
                "aspect_ratio": torch.tensor([[height / width]] * b, dtype=dtype, device=timestep.device),
            }
        time, embedded = model.adaln_single(timestep, added, batch_size=b, hidden_dtype=dtype)
        caption = condition.text if model.caption_projection is None else model.caption_projection(condition.text)
        bias = None if condition.mask is None else ((1 - condition.mask.to(dtype)) * MASKED).unsqueeze(1)
        return Modulation(time, final=embedded, caption=caption, caption_bias=bias)

    def block(self, block: nn.Module, tokens: Tokens, modulation: Modulation) -> Tokens:
        return Tokens(
            block(
                tokens.image,
                encoder_hidden_states=modulation.caption,
                encoder_attention_mask=modulation.caption_bias,
                timestep=modulation.time,
            )
        )

    def head(self, model: Any, image: Tensor, modulation: Modulation) -> Tensor:
        assert modulation.final is not None
        shift, scale = (model.scale_shift_table[None] + modulation.final[:, None]).chunk(2, dim=1)
        return model.proj_out(model.norm_out(image) * (1 + scale) + shift)  # type: ignore[no-any-return]
