"""Keys and values in fp8 (e4m3) caches, with one scale for keys and one for values, as in vLLM."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def narrowed(x: Tensor, scale: Tensor | None) -> Tensor:
    """Keys or values as an fp8 cache stores them; without a scale, as they are."""
    return x if scale is None else (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def widened(cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """An fp8 cache in `dtype` and multiplied by its scale; other caches as they are."""
    return cache if scale is None else (cache.float() * scale.float()).to(dtype)


def check_scales(op: str, cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Caches in fp8 need both scales, and others none."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != (cache.dtype == FP8):
            raise ValueError(f"{op} expects {name} for caches in float8_e4m3fn and only for these, got caches in {cache.dtype}.")
        if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
            raise ValueError(f"{op} expects a {name} of one float32, got {list(scale.shape)} {scale.dtype}.")
