"""Layers of a diffusion transformer joined into fewer, larger operations. The results are the same, apart from rounding."""

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


def split_last_products(model: Any) -> None:
    """The single blocks of FLUX; other models have none."""
    for place, block in enumerate(getattr(model, "single_transformer_blocks", ())):
        model.single_transformer_blocks[place] = SingleBlock(block)


def join_activations(model: nn.Module) -> None:
    """Feed-forward layers apply their GELU within the product before it."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GELU) and child.approximate == "tanh" and child.proj.bias is not None:
                setattr(module, name, LinearGelu(child.proj))
        if isinstance(getattr(module, "proj_mlp", None), nn.Linear) and _is_tanh_gelu(getattr(module, "act_mlp", None)):
            module.proj_mlp, module.act_mlp = LinearGelu(module.proj_mlp), nn.Identity()  # type: ignore[arg-type]


class SingleBlock(nn.Module):
    """A single block of FLUX, whose last product is two that add up: one would need a copy that joins attention and
    feed-forward."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.attn, self.proj_mlp, self.act_mlp = block.norm, block.attn, block.proj_mlp, block.act_mlp
        self.proj_out = block.proj_out

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, image_rotary_emb: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        text = encoder_hidden_states.shape[1]
        x = torch.cat((encoder_hidden_states, hidden_states), dim=1)
        normed, gate = self.norm(x, emb=temb)
        attended = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        width = attended.shape[-1]
        weight = self.proj_out.weight
        out = torch.nn.functional.linear(attended, weight[:, :width], self.proj_out.bias)
        fed = self.act_mlp(self.proj_mlp(normed))
        out = torch.addmm(out.flatten(0, 1), fed.flatten(0, 1), weight[:, width:].t()).view_as(out)
        x = x + gate.unsqueeze(1) * out
        if x.dtype == torch.float16:
            x = x.clip(-65504, 65504)  # as diffusers does
        return x[:, :text], x[:, text:]


def _is_tanh_gelu(activation: object) -> bool:
    return isinstance(activation, nn.GELU) and activation.approximate == "tanh"
