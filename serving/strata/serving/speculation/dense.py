"""Draft models that `draft_decoder.py` computes: small dense decoders like Llama, Mistral, Qwen2 and Qwen3."""

from pathlib import Path

from strata.platform.errors import UserError
from strata.platform.model_families import imported
from strata.platform.recipe import ModelSection
from strata.platform.recipe.model import ArchitectureSection

# Differences from Llama that the decoder has, and windows, which its contexts do not exceed.
COMPUTED = {"head_dim", "qkv_bias", "output_bias", "rope_scaling", "window", "sliding_layers"}
WEIGHTS_BYTES = 2**27  # of a larger draft, the products take longer than what vLLM does around them, and vLLM's are faster
LONGEST = 4096  # tokens of a context
CACHE_BYTES = 2**30  # of keys and values of all rows


def section_of(folder: Path) -> ModelSection | None:
    """The model's section; None for a model that vLLM computes."""
    if sum(file.stat().st_size for file in folder.glob("*.safetensors")) > WEIGHTS_BYTES:
        return None
    try:
        section = ModelSection(**imported.resolve({"from": str(folder)}))
    except UserError:
        return None
    own, plain = section.architecture.model_dump(exclude=COMPUTED), ArchitectureSection().model_dump(exclude=COMPUTED)
    heads_normed = own.pop("qk_norm") in ("none", "head")
    plain.pop("qk_norm")
    return section if heads_normed and own == plain and section.moe is None else None


def capacity(section: ModelSection, rows: int) -> int:
    """Tokens of a context that the cache of each of `rows` sequences holds."""
    token_bytes = 2 * 4 * section.layers * section.kv_heads * section.head_dim
    return min(section.context, section.architecture.window or section.context, LONGEST, CACHE_BYTES // (token_bytes * rows))


def least_capacity(tokens: int) -> int:
    """Tokens of a context that drafts of `tokens` need: a full cache starts again with its last half."""
    return 2 * (tokens + 1)
