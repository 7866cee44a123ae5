"""Text-to-image transformer (diffusers' SD3Transformer2DModel), its text encoder (transformers' CLIPTextModel), and the loss of
flow matching.

A noisy picture is (1 - t) x picture + t x noise. The model learns the velocity, noise - picture, at every share of noise t.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from strata.platform.recipe import CHANNELS, Kernels, ModelSection
from strata.training.data.pictures.captions import BEGIN_ID, END_ID, PAD_ID
from strata.training.diffusion.attention import JointAttention

TIMESTEPS = 1000  # the scheduler's timestep of pure noise
TEXT_HEAD = 32  # width of a head of the text encoder
PATCH_SCALE = 0.5  # of the patches' initial embedding: pixels that are mostly noise would drown the embedding of positions
ZERO = ("norm1.linear", "norm1_context.linear", "norm_out.linear", "proj_out")


class PictureModel(nn.Module):
    """Both models. Sequence-parallel ranks (`part` of `parts`) each have a slice of a picture's patches and of its caption."""

    def __init__(self, section: ModelSection, seed: int | None, kernels: Kernels = "torch") -> None:
        from diffusers import SD3Transformer2DModel
        from transformers import CLIPTextConfig, CLIPTextModel

        super().__init__()
        self.part, self.parts = 0, 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed or 0)
            self.transformer = SD3Transformer2DModel(**transformer_config(section))
            self.text_encoder = CLIPTextModel(CLIPTextConfig(**text_config(section)))
            if seed is not None:
                initialize(self.transformer)
        for block in self.transformer.transformer_blocks:
            block.attn.processor = JointAttention(kernels)

    def forward(
        self, pixels: Tensor, noise: Tensor, times_b: Tensor, captions_bt: Tensor, counts_b: Tensor, count: Tensor
    ) -> Tensor:
        """Sum of the patches' mean squared errors over `count`. Rows with `counts_b` of zero add nothing."""
        share = times_b.view(-1, 1, 1, 1)
        noisy = torch.lerp(pixels, noise, share)
        text_btd, pooled_bd = self.encode(captions_bt)
        found_bnp = self.velocity(noisy, times_b * TIMESTEPS, text_btd, pooled_bd)
        sought_bnp = self._slice(patches(noise - pixels, self.transformer.config.patch_size))
        errors_bn = (found_bnp.float() - sought_bnp).square().mean(-1)
        return (errors_bn.sum(1) * counts_b).sum() / count

    def encode(self, captions_bt: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of all tokens, and the end's."""
        out = self.text_encoder(input_ids=captions_bt)
        return out.last_hidden_state, out.pooler_output

    def velocity(self, noisy: Tensor, timesteps_b: Tensor, text_btd: Tensor, pooled_bd: Tensor) -> Tensor:
        """[b, n, patch x patch x 3] of this rank's patches. The same as the transformer's own forward pass, in parts."""
        model: Any = self.transformer
        image_bnd = self._slice(model.pos_embed(noisy.to(text_btd.dtype)))
        modulation_bd = model.time_text_embed(timesteps_b, pooled_bd)
        text_btd = self._slice(model.context_embedder(text_btd))
        for block in model.transformer_blocks:
            text_btd, image_bnd = block(image_bnd, text_btd, modulation_bd)
        return cast(Tensor, model.proj_out(model.norm_out(image_bnd, modulation_bd)))

    def _slice(self, x_bnd: Tensor) -> Tensor:
        """This rank's share of the tokens."""
        return x_bnd if self.parts == 1 else x_bnd.chunk(self.parts, 1)[self.part].contiguous()


def patches(pixels: Tensor, patch: int) -> Tensor:
    """[b, n, patch x patch x channels], in the order of the transformer's output."""
    batch, channels, height, width = pixels.shape
    cut = pixels.view(batch, channels, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def initialize(transformer: nn.Module) -> None:
    """Xavier for matrices, and zero where a block writes to the residual stream (adaLN-Zero): training begins at the identity."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.view(module.weight.shape[0], -1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if name.endswith(ZERO):
                nn.init.zeros_(module.weight)
            if name == "pos_embed.proj":
                module.weight.data.mul_(PATCH_SCALE)


def transformer_config(section: ModelSection) -> dict[str, Any]:
    """Arguments of SD3Transformer2DModel."""
    assert section.picture
    return {
        "sample_size": section.picture.size,
        "patch_size": section.picture.patch,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_layers": section.layers,
        "attention_head_dim": section.hidden // section.heads,
        "num_attention_heads": section.heads,
        "joint_attention_dim": section.picture.text_hidden,
        "caption_projection_dim": section.hidden,
        "pooled_projection_dim": section.picture.text_hidden,
        "pos_embed_max_size": section.picture.size // section.picture.patch,
        "qk_norm": "rms_norm",
    }


def text_config(section: ModelSection) -> dict[str, Any]:
    """Arguments of CLIPTextConfig."""
    assert section.picture
    width = section.picture.text_hidden
    return {
        "vocab_size": section.vocab,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "projection_dim": width,
        "num_hidden_layers": section.picture.text_layers,
        "num_attention_heads": width // TEXT_HEAD,
        "max_position_embeddings": section.picture.caption_tokens,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
    }
