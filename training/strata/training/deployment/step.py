"""One step of a decoder as a function of tensors: new tokens and the KV cache in, logits and the longer cache out.

The cache has every position of every layer; layers with a sliding window mask the older ones. So one graph computes prefill
(no past) and decoding, for any batch, and the mask of a padded batch is the plain attention mask.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from strata.platform.errors import UserError, shown

INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True)
class CacheShape:
    """Heads and widths of the keys and the values, in the order key, value of layer 0, key, value of layer 1, ..."""

    heads_and_widths: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    def past(self, batch: int, length: int, device: str = "cpu") -> list[Tensor]:
        shapes = [(batch, heads, length, width) for heads, width in self.heads_and_widths]
        return [torch.zeros(shape, dtype=self.dtype, device=device) for shape in shapes]

    def names(self, prefix: str) -> list[str]:
        layers = range(len(self.heads_and_widths) // 2)
        return [f"{prefix}.{layer}.{part}" for layer in layers for part in ("key", "value")]


class _PastLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's cache that begins with given keys and values, of which there may be none."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """The length without a test for an empty cache, which would tie the graph to one of both cases."""
        length: int = self.keys.shape[-2]
        return length


class DecoderStep(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """input_ids and position_ids: [batch, new]; attention_mask: [batch, past + new]; past: [batch, heads, past, width]."""
        cache = Cache(layers=[_PastLayer(keys, values) for keys, values in zip(past[::2], past[1::2], strict=True)])
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return out.logits, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def cache_shape(model: Any) -> CacheShape:
    """Shape of the cache that a forward pass over one token fills. Refuses models with other state than keys and values."""
    cache = DynamicCache()
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=one, past_key_values=cache, use_cache=True)
    tensors = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.keys.ndim != 4 or layer.keys.shape[2] != 1:
            cause = f"{type(model).__name__} cannot be exported: it has other state than the keys and values of a KV cache."
            raise UserError(cause, "Use a model with attention in each layer, such as those of docs/models.md.")
        tensors += [layer.keys, layer.values]
    return CacheShape(tuple((tensor.shape[1], tensor.shape[3]) for tensor in tensors), tensors[0].dtype)


def inputs(ids: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Arguments of a step. A position counts the tokens before it that are no padding."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, mask.shape[1] - ids.shape[1] :]
    return ids, mask, positions.contiguous(), past


def attention_of_any_batch(device: str) -> AbstractContextManager[Any]:
    """On CUDA, torch's choice between attention kernels depends on whether the batch is 1; the plain formula has no choice."""
    return sdpa_kernel(SDPBackend.MATH) if torch.device(device).type == "cuda" else nullcontext()


def _sizes_without_special_cases() -> AbstractContextManager[Any]:
    """Sizes of 0 and 1 are treated as any other, so that a past of 0 tokens and a batch of 1 are part of the graph."""
    settings: Any = symbolic_shapes
    context: AbstractContextManager[Any] = settings.patch(backed_size_oblivious=True)
    return context


def trace(model: Any, shape: CacheShape) -> ExportedProgram:
    """The step's graph, for any batch, any number of new tokens, and any past length from 0 on."""
    batch, new, past = 2, 3, 5  # sizes of the example: different ones, so that no two of them are taken for the same
    device = str(model.device)
    ids = torch.zeros(batch, new, dtype=torch.long, device=device)
    mask = torch.ones(batch, past + new, dtype=torch.long, device=device)
    example = inputs(ids, mask, shape.past(batch, past, device))
    rows, before, total = Dim("rows", min=1), Dim("past", min=0), Dim("total", min=1)
    # Attention without a fused kernel (Gemma 2, gpt-oss) compares strides in a way that tells one new token from several, so
    # that a range which includes 1 is refused. The check decodes one token at a time, and covers it.
    columns = Dim.DYNAMIC
    dynamic = (
        {0: rows, 1: columns},
        {0: rows, 1: total},
        {0: rows, 1: columns},
        [{0: rows, 2: before} for _ in shape.heads_and_widths],
    )
    try:
        with torch.no_grad(), _sizes_without_special_cases(), attention_of_any_batch(device):
            return torch.export.export(DecoderStep(model), example, dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # torch raises many kinds, by the operation that it cannot trace
        cause = f"torch.export cannot trace {type(model).__name__}: {shown(f'{type(error).__name__}: {error}', 300)}"
        raise UserError(cause, "Use a model of a family of docs/models.md.") from error
