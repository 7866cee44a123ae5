"""Frozen projections in NF4 (QLoRA, arXiv 2305.14314), through bitsandbytes: four bits a weight, in blocks of 64 with a scale
each, and the scales in eight bits (double quantization)."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from strata.platform.errors import UserError

BLOCK = 64  # weights with a common scale, as in the paper


class Nf4Linear(nn.Module):
    """A linear layer without a weight until `fill`. The quantized weight is neither a parameter nor a buffer: it is not trained,
    saved, partitioned nor cast with the model."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self._packed: Tensor | None = None
        self._state: Any = None

    @property
    def filled(self) -> bool:
        return self._packed is not None

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Quantizes a weight, on its device. Products have its dtype."""
        from bitsandbytes.functional import quantize_4bit

        self._packed, self._state = quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )

    def dequantized(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(self._packed, self._state)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        assert self._packed is not None, "the weights have not been loaded"
        y: Tensor = matmul_4bit(x, self._packed.t(), quant_state=self._state, bias=self.bias)
        return y


def require_installed() -> None:
    if find_spec("bitsandbytes") is None:
        fix = "Set up with PROFILE=gpu, or remove train.lora.base."
        raise UserError("train.lora.base=nf4 needs bitsandbytes, which is not here.", fix)
