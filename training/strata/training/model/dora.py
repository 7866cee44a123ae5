"""DoRA (arXiv 2402.09353), in peft's form: a projection with an adapter, whose rows have a trained length.

    y = m / |W + sBA| (W + sBA) x

The norm of each row is a constant of the backward pass, as in section 4.3 of the paper. Its square is summed up from products
that the projection's own layers compute,

    |W + sBA|^2 = |W|^2 + 2s (W A^T) B + s^2 (B A A^T) B

row by row. So W + sBA is never in memory, and the norm is that of whole rows also where tensor parallelism splits them, where
ZeRO gathers W for its layer only, and where W is quantized.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.platform.recipe import LoraSection
from strata.training.model.lora import LoraLinear

SMALLEST = 1e-15  # norm; a row of zeros then stays one, instead of becoming 0 / 0


class DoraLinear(LoraLinear):
    """`weight_squares` are |W|^2 of this rank's rows, which do not change: a load sets them after the weights."""

    weight_squares: Tensor

    def __init__(self, base: nn.Linear, lora: LoraSection) -> None:
        super().__init__(base, lora)
        device, dtype = base.weight.device, base.weight.dtype
        self.lora_magnitude_vector = nn.Parameter(torch.empty(base.out_features, device=device, dtype=dtype))
        self.register_buffer("weight_squares", torch.empty(base.out_features, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.lora_magnitude_vector / self._norm()
        plain, bias = self.base(x), self.base.bias
        if isinstance(self.dropout, nn.Identity) or not self.training:
            product = plain if bias is None else plain - bias
            y: Tensor = factor * (product + self.lora_B(self.lora_A(x)) * self.scale)
            return y if bias is None else y + bias
        # As in peft, dropped inputs count in what the adapter adds to the base: a second product with W.
        x = self.dropout(x)
        y = plain + (factor - 1) * self._product(x) + factor * self.lora_B(self.lora_A(x)) * self.scale
        return y

    def _product(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y if self.base.bias is None else y - self.base.bias

    @torch.no_grad()
    def _norm(self) -> Tensor:
        a, b = self.lora_A.weight.detach(), self.lora_B.weight.detach()
        crossed = 2 * self.scale * self._product(a).float().t()
        added = self.scale**2 * (b.float() @ self.lora_A(a).float())
        squares: Tensor = self.weight_squares + ((crossed + added) * b.float()).sum(1)
        return squares.clamp_min(SMALLEST**2).sqrt().to(b.dtype)


def merged(weight: Tensor, magnitude: Tensor) -> Tensor:
    """Weight with the rows' lengths of DoRA, from the weight into which the adapter is merged, in fp32."""
    return magnitude.float().unsqueeze(1) * F.normalize(weight.float(), dim=1, eps=SMALLEST)
