"""rms_norm forward, with a residual, and backward. All are memory-bound: one read and one write."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.ops.rms_norm.rms_norm import add_rms_norm, reference, rms_norm

TOLERANCE = 1e-2  # bf16
EPS = 1e-5
FORWARD_BARS = (Bar(0.9, "copy"), Bar(1.0, "Liger"), Bar(1.0, "torch.compile"))
BACKWARD_BARS = (Bar(0.8, "copy"), Bar(1.5, "Liger"))
NO_LIGER = Missing("liger-kernel is not installed")


def cases() -> list[Case]:
    shapes = ((16384, 4096), (16384, 8192), (16384, 16384), (65536, 1024), (16384, 5120))
    with_bars = {(16384, 4096), (16384, 8192), (16384, 16384)}
    return [
        *(_case("forward", _forward, shape, FORWARD_BARS if shape in with_bars else ()) for shape in shapes),
        *(_case("with residual", _with_residual, shape, FORWARD_BARS if shape in with_bars else ()) for shape in shapes),
        *(_case("backward", _backward, shape, BACKWARD_BARS if shape == (16384, 4096) else ()) for shape in shapes),
    ]


def _case(kind: str, build: Callable[..., Contest], shape: tuple[int, int], bars: tuple[Bar, ...]) -> Case:
    rows, width = shape
    return Case("rms_norm", f"{kind} {rows} x {width}", partial(build, rows, width), bars)


def _forward(rows: int, width: int, device: torch.device) -> Contest:
    x, weight = _inputs(rows, width, device)
    return Contest(
        contenders={
            OURS: partial(rms_norm, x, weight, EPS),
            "torch eager": partial(_eager, x, weight),
            "torch.compile": partial(torch.compile(_eager, dynamic=False), x, weight),
            "Liger": _liger(x, weight),
        },
        reference=partial(reference, x.float(), weight.float(), EPS),
        tolerance=TOLERANCE,
        bytes=2 * x.nbytes + weight.nbytes,
    )


def _with_residual(rows: int, width: int, device: torch.device) -> Contest:
    x, weight = _inputs(rows, width, device)
    residual = torch.randn_like(x)
    return Contest(
        contenders={
            OURS: partial(add_rms_norm, x, residual, weight, EPS),
            "torch eager": partial(_eager_with_residual, x, residual, weight),
            "torch.compile": partial(torch.compile(_eager_with_residual, dynamic=False), x, residual, weight),
            "Liger": _liger_with_residual(x, residual, weight),
        },
        reference=lambda: (reference(x.float() + residual.float(), weight.float(), EPS), x.float() + residual.float()),
        tolerance=TOLERANCE,
        bytes=4 * x.nbytes + weight.nbytes,
    )


def _backward(rows: int, width: int, device: torch.device) -> Contest:
    """Calls the backward operators directly: autograd's bookkeeping would be a good part of the time."""
    x, weight = _inputs(rows, width, device)
    dy = torch.randn_like(x)
    _, rstd = torch.ops.strata.rms_norm(x, weight, EPS)
    aten = partial(torch.ops.aten._fused_rms_norm_backward, dy, x, [width], rstd[:, None], weight, [True, True])
    return Contest(
        contenders={
            OURS: partial(torch.ops.strata.rms_norm_backward, dy, None, x, weight, rstd),
            "torch eager": aten,
            "torch.compile": partial(torch.compile(_gradients, dynamic=False), dy, x, weight, rstd),
            "Liger": _liger_backward(dy, x, weight),
        },
        reference=partial(_gradients, dy.float(), x.float(), weight.float(), rstd),
        tolerance=TOLERANCE,
        bytes=3 * x.nbytes + 2 * weight.nbytes + rstd.nbytes,
    )


def _inputs(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x, weight = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((rows, width), (width,)))
    return x, weight


def _eager(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _eager_with_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    normal = x.float() * rstd[:, None]
    dnormal = dy.float() * weight.float()
    dx = (dnormal - normal * (normal * dnormal).mean(-1, keepdim=True)) * rstd[:, None]
    return dx.to(x.dtype), (dy.float() * normal).sum(0).to(weight.dtype)


def _liger(x: Tensor, weight: Tensor) -> Callable[[], Any] | Missing:
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        return NO_LIGER
    return partial(LigerRMSNormFunction.apply, x, weight, EPS)


def _liger_with_residual(x: Tensor, residual: Tensor, weight: Tensor) -> Callable[[], Any] | Missing:
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    except ImportError:
        return NO_LIGER
    return partial(LigerFusedAddRMSNormFunction.apply, x, residual, weight, EPS)


def _liger_backward(dy: Tensor, x: Tensor, weight: Tensor) -> Callable[[], Any] | Missing:
    """Liger's default writes dx over dy; only the first call, which is compared, sees the original dy."""
    try:
        from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
    except ImportError:
        return NO_LIGER
    _, x, rstd, block, warps, casting = rms_norm_forward(x, weight, EPS, 0.0, "llama", None)
    return partial(rms_norm_backward, dy.clone(), x, weight, rstd, 0.0, casting, block, warps, in_place=True, row_mode=None)
