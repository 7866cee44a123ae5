"""Joined layers compute the same, and hold each weight once."""

from typing import Any

import diffusers
import pytest
from torch import nn

from strata.serving.diffusion.attention import Seam, install
from strata.serving.diffusion.joined_layers import LinearGelu, join_activations

FLUX: dict[str, Any] = {
    "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 24, "pooled_projection_dim": 12, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
PIXART: dict[str, Any] = {
    "sample_size": 8, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "cross_attention_dim": 16,
    "caption_channels": 12, "in_channels": 4, "out_channels": 8,
}  # fmt: skip


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "config", "activations"), [("FluxTransformer2DModel", FLUX, 3), ("PixArtTransformer2DModel", PIXART, 1)]
)
def test_every_projection_and_activation_is_joined(kind: str, config: dict[str, Any], activations: int) -> None:
    model = getattr(diffusers, kind)(**config)
    before = parameters(model)
    install(model, Seam())
    join_activations(model)
    assert parameters(model) == before
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    assert not names & {"to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"}
    assert sum(isinstance(module, LinearGelu) for module in model.modules()) == activations


def test_a_feed_forward_without_bias_or_with_another_activation_stays() -> None:
    from diffusers.models.activations import GELU
    from diffusers.models.attention import FeedForward

    for unchanged in (FeedForward(8, activation_fn="gelu"), FeedForward(8, activation_fn="gelu-approximate", bias=False)):
        join_activations(unchanged)
        assert isinstance(unchanged.net[0], GELU)
