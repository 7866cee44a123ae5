"""DiT: class labels and time in the adaptive norm of every block; the last class means unconditional."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.serving.diffusion.families.family import Condition, Family, Modulation, Tokens


class DiT(Family):
    name = "dit"

    def null(self, model: Any, count: int) -> Condition | None:
        return Condition(labels=torch.full((count,), model.config.num_embeds_ada_norm, device=model.device))

    def tokens(self, model: Any, latents: Tensor, condition: Condition) -> Tokens:
        return Tokens(model.pos_embed(latents))

    def modulation(
        self, model: Any, timestep: Tensor, condition: Condition, guidance: Tensor, grid: tuple[int, int], size: tuple[int, int]
    ) -> Modulation:
        final = model.transformer_blocks[0].norm1.emb(timestep, condition.labels, hidden_dtype=model.dtype)
        return Modulation(timestep, final=final, labels=condition.labels)

    def block(self, block: nn.Module, tokens: Tokens, modulation: Modulation) -> Tokens:
        return Tokens(block(tokens.image, timestep=modulation.time, class_labels=modulation.labels))

    def head(self, model: Any, image: Tensor, modulation: Modulation) -> Tensor:
        assert modulation.final is not None
        shift, scale = model.proj_out_1(F.silu(modulation.final)).chunk(2, dim=1)
        return model.proj_out_2(model.norm_out(image) * (1 + scale[:, None]) + shift[:, None])  # type: ignore[no-any-return]
