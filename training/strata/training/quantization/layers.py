"""Linear layers of a model that are quantized, and those that stay as they are."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from strata.platform.errors import UserError
from strata.training.quantization.formats import GROUP_SIZES, Format


@dataclass(frozen=True)
class Plan:
    """`quantized` are names of linear layers, with `head`, the output layer, or without; `left` are all others in the model.
    `unfit` are those of the decoder whose inputs the group size does not divide."""

    format: Format
    group_size: int | None
    quantized: tuple[str, ...]
    left: tuple[str, ...]
    unfit: tuple[str, ...]
    head: str | None


def decoder_layers(model: Any) -> nn.ModuleList:
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        cause = f"{type(model).__name__} has no list of decoder layers where transformers' models have it."
        raise UserError(cause, "Use a model of one of the families in docs/models.md.")
    return layers


def plan(model: Any, format: Format, group_size: int | None, with_head: bool) -> Plan:
    """Every linear layer of the decoder whose inputs the group size divides. Projections that vLLM fuses (q, k and v; gate and
    up) have the same inputs, so they are quantized together or not at all. The output layer is a small share of most models'
    weights, and a sensitive one, so it is quantized on request only."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    prefixes = {f"{name}." for name, module in model.named_modules() if module is decoder_layers(model)}
    inside = {name: module for name, module in linear.items() if any(name.startswith(prefix) for prefix in prefixes)}
    if not inside:
        raise UserError(f"{type(model).__name__} has no linear layers in its decoder.", "Use a model with dense linear layers.")
    widths = sorted({module.in_features for module in inside.values()})
    if not format.grouped:
        if group_size is not None:
            raise UserError(f"--group-size is for 4-bit formats; {format.name} has a scale for each channel.", "Leave it out.")
        return _plan(format, None, linear, tuple(inside), tuple(inside), _head(model, linear) if with_head else None)
    size = group_size or _largest_common(widths)
    fitting = tuple(name for name, module in inside.items() if size and module.in_features % size == 0)
    if not fitting:
        sizes = ", ".join(map(str, widths))
        cause = (
            f"No group size fits the layers, which have {sizes} inputs: {group_size or 'none of 128, 64 and 32'} divides none."
        )
        raise UserError(cause, "Use --format w8a8-int8 or w8a8-fp8, which have no groups.")
    head = _head(model, linear) if with_head else None
    if head is not None and size and linear[head].in_features % size:
        cause = f"--head: groups of {size} do not divide the {linear[head].in_features} inputs of the output layer."
        raise UserError(cause, "Choose another --group-size, or leave --head out.")
    return _plan(format, size, linear, tuple(inside), fitting, head)


def _head(model: Any, linear: dict[str, nn.Linear]) -> str:
    output = model.get_output_embeddings()
    if output.weight is model.get_input_embeddings().weight:
        cause = "--head: the output layer of this model shares its weights with the input embedding, which is not quantized."
        raise UserError(cause, "Leave --head out.")
    return next(name for name, module in linear.items() if module is output)


def _largest_common(widths: list[int]) -> int | None:
    """The largest size that divides all widths; if there is none, the largest that divides some."""
    everywhere = (size for size in GROUP_SIZES if all(width % size == 0 for width in widths))
    somewhere = (size for size in GROUP_SIZES if any(width % size == 0 for width in widths))
    return next(everywhere, next(somewhere, None))


def _plan(
    format: Format,
    size: int | None,
    linear: dict[str, nn.Linear],
    inside: tuple[str, ...],
    fitting: tuple[str, ...],
    head: str | None,
) -> Plan:
    quantized = (*fitting, head) if head else fitting
    left = tuple(name for name in linear if name not in quantized)
    return Plan(format, size, quantized, left, tuple(name for name in inside if name not in fitting), head)
