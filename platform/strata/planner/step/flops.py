"""Operations of a model's products, as MFU counts them: attention as if nothing were masked, as PaLM and Megatron do; recompute
not at all."""

from strata.planner.catalogue.shape import Shape


def forward_flops(shape: Shape, sequence: int) -> float:
    """Of one token's forward pass. The backward pass has twice as many."""
    return 2 * matrix_parameters(shape) + shape.layers * attention_flops(shape, sequence)


def attention_flops(shape: Shape, sequence: int) -> float:
    """Of one token in one layer, between queries, keys and values."""
    key = shape.latent.plain_dim + shape.latent.rotary_dim if shape.latent else shape.head_dim
    value = shape.latent.value_dim if shape.latent else shape.head_dim
    return 2.0 * sequence * shape.heads * (key + value)


def matrix_parameters(shape: Shape) -> int:
    """Those that a token is multiplied with: neither embeddings, which are looked up, nor experts it does not pass through."""
    head = shape.vocab * shape.hidden
    return shape.active_parameters() - shape.embedding_parameters() - shape.head_parameters() + head
