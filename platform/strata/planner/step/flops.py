"""FLOPs of a model's matrix products, as MFU counts them.

The convention is PaLM's (Chowdhery et al. 2022, appendix B), which most published figures follow: per token 2 operations for each
parameter of a matrix product in the forward pass and 4 in the backward pass, and attention's two products without a discount for
the causal half that a good kernel skips. Recomputed activations are not counted: recomputing lowers MFU, as it should.
"""

from strata.planner.catalogue.shape import Shape


def forward_flops(shape: Shape, sequence: int) -> float:
    """One token's forward pass. The backward pass has twice as many."""
    return 2 * shape.matrix_parameters() + shape.layers * attention_flops(shape, sequence)


def attention_flops(shape: Shape, sequence: int) -> float:
    """One token in one layer, between queries, keys and values."""
    key = shape.latent.plain_dim + shape.latent.rotary_dim if shape.latent else shape.head_dim
    value = shape.latent.value_dim if shape.latent else shape.head_dim
    return 2.0 * sequence * shape.heads * (key + value)
