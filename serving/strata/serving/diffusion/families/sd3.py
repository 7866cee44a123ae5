"""Stable Diffusion 3 and Strata's own small model: joint attention of text and image, adaptive norms by time and text."""

from typing import Any

from torch import Tensor, nn

from strata.serving.diffusion.families.family import Condition, Family, Modulation, Tokens


class SD3(Family):
    name = "sd3"
    joint_text = True
    max_shift = 1.16

    def tokens(self, model: Any, latents: Tensor, condition: Condition) -> Tokens:
        return Tokens(model.pos_embed(latents).contiguous(), model.context_embedder(condition.text))

    def modulation(
        self, model: Any, timestep: Tensor, condition: Condition, guidance: Tensor, grid: tuple[int, int], size: tuple[int, int]
    ) -> Modulation:
        return Modulation(model.time_text_embed(timestep, condition.pooled))

    def block(self, block: nn.Module, tokens: Tokens, modulation: Modulation) -> Tokens:
        text, image = block(hidden_states=tokens.image, encoder_hidden_states=tokens.text, temb=modulation.time)
        return Tokens(image, text)  # the last block returns no text

    def head(self, model: Any, image: Tensor, modulation: Modulation) -> Tensor:
        return model.proj_out(model.norm_out(image, modulation.time))  # type: ignore[no-any-return]
