"""FLUX: joint attention in two kinds of blocks, rotary positions, guidance as an input of the distilled models."""

from typing import Any

import torch
from torch import Tensor, nn

from strata.serving.diffusion.families.family import Condition, Family, Modulation, Tokens


class Flux(Family):
    name = "flux"
    joint_text = True
    text_first = True
    distilled_guidance = True

    def patch(self, model: Any) -> int:
        return 2  # the pipeline packs 2 x 2 latent pixels into the channels of a token

    def channels(self, model: Any) -> int:
        return int(model.config.in_channels) // 4

    def blocks(self, model: Any) -> list[nn.Module]:
        return [*model.transformer_blocks, *model.single_transformer_blocks]

    def scheduler_sigmas(self, steps: int) -> list[float] | None:
        return torch.linspace(1.0, 1 / steps, steps, dtype=torch.float64).tolist()

    def tokens(self, model: Any, latents: Tensor, condition: Condition) -> Tokens:
        packed = torch.unflatten(torch.unflatten(latents, 2, (-1, 2)), 4, (-1, 2))  # [b, c, rows, 2, columns, 2]
        packed = packed.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return Tokens(model.x_embedder(packed), model.context_embedder(condition.text))

    def modulation(
        self, model: Any, timestep: Tensor, condition: Condition, guidance: Tensor, grid: tuple[int, int], size: tuple[int, int]
    ) -> Modulation:
        assert condition.text is not None
        dtype = condition.text.dtype
        # In the order of diffusers, so that bf16 rounds alike.
        time = (timestep.to(dtype) / 1000) * 1000
        times = (time, guidance.to(dtype) * 1000) if model.config.guidance_embeds else (time,)
        rows, columns = grid
        positions = torch.zeros(rows, columns, 3, device=timestep.device)
        positions[..., 1] += torch.arange(rows, device=timestep.device)[:, None]
        positions[..., 2] += torch.arange(columns, device=timestep.device)[None, :]
        return Modulation(
            model.time_text_embed(*times, condition.pooled),
            image_rope=model.pos_embed(positions.flatten(0, 1)),
            text_rope=model.pos_embed(torch.zeros(condition.text.shape[1], 3, device=timestep.device)),
        )

    def block(self, block: nn.Module, tokens: Tokens, modulation: Modulation) -> Tokens:
        text, image = block(
            hidden_states=tokens.image,
            encoder_hidden_states=tokens.text,
            temb=modulation.time,
            image_rotary_emb=modulation.rope,
        )
        return Tokens(image, text)

    def head(self, model: Any, image: Tensor, modulation: Modulation) -> Tensor:
        return model.proj_out(model.norm_out(image, modulation.time))  # type: ignore[no-any-return]

    def latents(self, model: Any, values: Tensor, columns: int) -> Tensor:
        values = torch.unflatten(torch.unflatten(values, 1, (-1, columns)), -1, (-1, 2, 2))
        return torch.einsum("nhwcpq->nchpwq", values).flatten(4, 5).flatten(2, 3)
