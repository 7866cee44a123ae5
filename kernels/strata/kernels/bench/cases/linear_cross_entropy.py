"""linear_cross_entropy: mean loss and gradients of input and weight together, as in a training step."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.ops.linear_cross_entropy.linear_cross_entropy import linear_cross_entropy, reference

TOLERANCE = 1e-2  # bf16

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def cases() -> list[Case]:
    with_bar = _case(8192, 4096, 131072, (Bar(1.3, "Liger"),), memory_limit=2 * 10**9)
    return [with_bar, _case(8192, 4096, 32000), _case(16384, 2048, 50257), _case(2048, 1024, 4096)]


def _case(tokens: int, width: int, vocabulary: int, bars: tuple[Bar, ...] = (), memory_limit: int | None = None) -> Case:
    name = f"{tokens} x {width} x {vocabulary}"
    return Case("linear_cross_entropy", name, partial(_contest, tokens, width, vocabulary), bars, memory_limit)


def _contest(tokens: int, width: int, vocabulary: int, device: torch.device) -> Contest:
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    weight = (torch.randn(vocabulary, width, device=device) * width**-0.5).bfloat16()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    targets[::7] = -100
    return Contest(
        contenders={
            OURS: partial(_step, linear_cross_entropy, x, weight, targets),
            "torch eager": partial(_step, _eager, x, weight, targets),
            "torch.compile": partial(_step, torch.compile(_eager, dynamic=False), x, weight, targets),
            "Liger": _liger(x, weight, targets),
        },
        reference=partial(_step, reference, x.float(), weight.float(), targets),
        tolerance=TOLERANCE,
        bytes=2 * (x.nbytes + weight.nbytes) + targets.nbytes,
        flops=3 * 2 * tokens * width * vocabulary,
    )


def _step(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    value = loss(x, weight, targets)
    return value.detach(), *torch.autograd.grad(value, (x, weight))


def _eager(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.T).float(), targets)


def _liger(x: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], tuple[Tensor, ...]] | Missing:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError:
        return Missing("liger-kernel is not installed")

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        value: Tensor = LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets)[0]
        return value

    return partial(_step, loss, x, weight, targets)
