"""Moves scales of channels from the input of linear layers into the operation before them, which leaves the model as it is.

AWQ scales channels with large activations up, so that their weights are rounded more exactly. SmoothQuant scales weights up where
activations have outliers, so that 8-bit activations lose less.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn

from strata.training.quantization import grid
from strata.training.quantization.calibration import Statistics

STEPS = 20  # of AWQ's search between no scaling and scaling by the whole magnitude
SMOOTHING = 0.5  # share of the outliers that moves into the weights
LEAST = 1e-5


@dataclass(frozen=True)
class Pair:
    """An operation without a nonlinearity between its output and the input of the linear layers in `after`."""

    before: nn.Module
    after: tuple[str, ...]


Choose = Callable[[list[Tensor], Statistics], Tensor]


def pairs(layer: Any, prefix: str, quantized: set[str]) -> list[Pair]:
    """Pairs in a decoder layer whose linear layers are all quantized. Layers without norms before their projections (OLMo 2) have
    none for these; heads that share values have none between the values and the output."""
    attention, mlp = layer.self_attn, layer.mlp
    found = [Pair(mlp.up_proj, ("mlp.down_proj",))]
    if attention.v_proj.out_features == attention.o_proj.in_features:
        found.append(Pair(attention.v_proj, ("self_attn.o_proj",)))
    if hasattr(layer, "input_layernorm"):
        second = getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm
        found.append(Pair(layer.input_layernorm, tuple(f"self_attn.{kind}_proj" for kind in "qkv")))
        found.append(Pair(second, ("mlp.gate_proj", "mlp.up_proj")))
    named = [Pair(each.before, tuple(f"{prefix}{name}" for name in each.after)) for each in found]
    return [each for each in named if set(each.after) <= quantized]


def awq(args: QuantizationArgs, stored: torch.dtype) -> Choose:
    """Searches the scales with the least error of the layers' output, which the second moments of the input give exactly."""

    def choose(weights: list[Tensor], statistics: Statistics) -> Tensor:
        magnitudes = statistics.mean.clamp(min=LEAST)
        whole = torch.cat(weights)
        best, least = torch.ones_like(magnitudes), float("inf")
        for step in range(STEPS):
            scales = _centred(magnitudes ** (step / STEPS))
            rounded = grid.fit(whole * scales, args, stored).round(whole * scales) / scales
            difference = rounded - whole
            error = float(((difference @ statistics.hessian) * difference).sum())
            if error < least:
                best, least = scales, error
        return best

    return choose


def smooth(weights: list[Tensor], statistics: Statistics) -> Tensor:
    """SmoothQuant's scales: both sides' largest values meet in the middle."""
    activations = statistics.largest.clamp(min=LEAST)
    largest = torch.cat(weights).abs().amax(0).clamp(min=LEAST)
    return (activations**SMOOTHING / largest ** (1 - SMOOTHING)).clamp(min=LEAST)


def apply(pair: Pair, linear: Mapping[str, nn.Linear], scales: Tensor, one_added: bool, stored: torch.dtype) -> Tensor:
    """Divides the operation before the layers by the scales and multiplies the layers' weights by them. Returns the scales that
    were applied: those of a norm follow from its weight after rounding, so that the two still cancel. `one_added`: the norm
    multiplies by 1 + weight, as Gemma's."""
    before = pair.before
    if isinstance(before, nn.Linear):
        before.weight.data.div_(scales[:, None])
        if before.bias is not None:
            before.bias.data.div_(scales)
    else:
        assert isinstance(before.weight, Tensor)
        offset = 1.0 if one_added else 0.0
        old = before.weight.data.float() + offset
        new = (old / scales - offset).to(stored)
        before.weight.data.copy_(new)
        scales = torch.where(old == 0, scales, old / (new.float() + offset))
    for name in pair.after:
        linear[name].weight.data.mul_(scales)
    return scales


def _centred(scales: Tensor) -> Tensor:
    return scales / (scales.max() * scales.min()).sqrt()
