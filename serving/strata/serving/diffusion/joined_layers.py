"""Layers of a diffusion transformer joined into fewer, larger ones. The results are the same, apart from rounding."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn

from strata.kernels.ops.linear_gelu import linear_gelu


def join_projections(attn: Any) -> None:
    """One product for queries, keys and values: a GPU that computes three narrow ones idles in the last tiles of each."""
    if getattr(attn, "is_cross_attention", False):
        attn.to_kv = _joined(attn, ("to_k", "to_v"))
        return
    attn.to_qkv = _joined(attn, ("to_q", "to_k", "to_v"))
    if getattr(attn, "add_q_proj", None) is not None:
        attn.to_added_qkv = _joined(attn, ("add_q_proj", "add_k_proj", "add_v_proj"))


@torch.no_grad()
def _joined(attn: Any, names: Sequence[str]) -> nn.Linear:
    """A layer that takes the place of these, which it removes."""
    layers: list[nn.Linear] = [getattr(attn, name) for name in names]
    with torch.device("meta"):
        joined = nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers), layers[0].bias is not None)
    joined.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    if layers[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    for name in names:
        delattr(attn, name)
    return joined


class LinearGelu(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear_gelu(x, self.weight, self.bias)


def join_activations(model: nn.Module) -> None:
    """Feed-forward layers apply their GELU within the product before it."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GELU) and child.approximate == "tanh" and child.proj.bias is not None:
                setattr(module, name, LinearGelu(child.proj))
        if isinstance(getattr(module, "proj_mlp", None), nn.Linear) and _is_tanh_gelu(getattr(module, "act_mlp", None)):
            module.proj_mlp, module.act_mlp = LinearGelu(module.proj_mlp), nn.Identity()  # type: ignore[arg-type]


def _is_tanh_gelu(activation: object) -> bool:
    return isinstance(activation, nn.GELU) and activation.approximate == "tanh"
