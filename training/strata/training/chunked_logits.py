"""Logits of tokens in chunks, for losses that never hold the logits of all tokens at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

LOGIT_BYTES = {"cuda": 1 << 29, "cpu": 1 << 24}  # of a chunk: large products on a GPU, cache-resident logits on a CPU


def chunks(tokens: int, weight_vd: Tensor) -> Iterator[slice]:
    row_bytes = len(weight_vd) * logit_dtype(weight_vd).itemsize
    size = max(1, LOGIT_BYTES[weight_vd.device.type] // row_bytes)
    for start in range(0, tokens, size):
        yield slice(start, start + size)


def logits_of(x_nd: Tensor, weight_vd: Tensor, softcap: float | None) -> Tensor:
    logits = (x_nd @ weight_vd.T).to(logit_dtype(x_nd))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def logit_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
