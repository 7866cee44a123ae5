"""Checks of model shapes: counts out of range, indivisible heads, more experts per token than experts."""

from strata.planner import ranges
from strata.planner.catalogue.shape import Experts, Shape
from strata.platform.errors import UserError, shown


def check_shape(shape: Shape) -> Shape:
    """Returns a valid shape, or raises an error with the field names of a recipe's `model` section."""
    for part, table in ((shape, ranges.SHAPE), (shape.experts, ranges.EXPERTS), (shape.latent, ranges.LATENT)):
        for name, within in table.items() if part else ():
            value = getattr(part, name)
            if value not in within:
                raise UserError(
                    f"The model {shape.name} has {name}={shown(value)}, which is out of range.",
                    f"Its range is {within}.",
                )
    if shape.heads % shape.kv_heads:
        raise UserError(
            f"The {shape.heads} heads of the model {shape.name} are not a multiple of its {shape.kv_heads} key/value heads.",
            "Give it key/value heads that divide its heads.",
        )
    if shape.experts:
        _check_experts(shape, shape.experts)
    return shape


def _check_experts(shape: Shape, experts: Experts) -> None:
    if experts.top_k > experts.count:
        raise UserError(
            f"Each token of the model {shape.name} chooses {experts.top_k} experts, and there are {experts.count}.",
            f"Let it choose {experts.count} at most.",
        )
    if experts.dense_layers >= shape.layers:
        raise UserError(
            f"The first {experts.dense_layers} of the {shape.layers} layers of the model {shape.name} are dense:"
            " none is left for its experts.",
            f"Give it {shape.layers - 1} dense layers at most, or no experts.",
        )
