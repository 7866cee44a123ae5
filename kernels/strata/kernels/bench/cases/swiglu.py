"""swiglu forward and backward, on separate gate and up tensors and on the halves of a packed projection."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.ops.swiglu import reference, swiglu

TOLERANCE = 1e-2  # bf16
BARS = (Bar(0.9, "copy"), Bar(1.0, "Liger"), Bar(1.0, "torch.compile"))
NO_LIGER = Missing("liger-kernel is not installed")


def cases() -> list[Case]:
    shapes = ((16384, 4096), (16384, 14336))
    return [
        *(_case("forward", _forward, shape, BARS) for shape in shapes),
        _case("forward packed", partial(_forward, packed=True), (16384, 14336), ()),
        *(_case("backward", _backward, shape, ()) for shape in shapes),
    ]


def _case(kind: str, build: Callable[..., Contest], shape: tuple[int, int], bars: tuple[Bar, ...]) -> Case:
    rows, width = shape
    return Case("swiglu", f"{kind} {rows} x {width}", partial(build, rows, width), bars)


def _forward(rows: int, width: int, device: torch.device, packed: bool = False) -> Contest:
    gate, up = _inputs(rows, width, device, packed)
    return Contest(
        contenders={
            OURS: partial(swiglu, gate, up),
            "torch eager": partial(reference, gate, up),
            "torch.compile": partial(torch.compile(reference, dynamic=False), gate, up),
            "Liger": _liger(gate, up),
        },
        reference=partial(reference, gate.float(), up.float()),
        tolerance=TOLERANCE,
        bytes=3 * gate.nbytes,
    )


def _backward(rows: int, width: int, device: torch.device) -> Contest:
    """Calls the backward operators directly, without autograd."""
    gate, up = _inputs(rows, width, device, packed=False)
    dout = torch.randn_like(gate)
    return Contest(
        contenders={
            OURS: partial(torch.ops.strata.swiglu_backward, dout, gate, up),
            "torch eager": partial(_eager_gradients, dout, gate, up),
            "torch.compile": partial(torch.compile(_gradients, dynamic=False), dout, gate, up),
            "Liger": _liger_backward(dout, gate, up),
        },
        reference=partial(_gradients, dout.float(), gate.float(), up.float()),
        tolerance=TOLERANCE,
        bytes=5 * gate.nbytes,
    )


def _inputs(rows: int, width: int, device: torch.device, packed: bool) -> tuple[Tensor, Tensor]:
    if packed:
        gate, up = torch.randn(rows, 2 * width, device=device, dtype=torch.bfloat16).chunk(2, dim=-1)
    else:
        gate, up = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    return gate, up


def _gradients(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide, sigmoid = gate.float(), torch.sigmoid(gate.float())
    dgate = dout.float() * up.float() * sigmoid * (1 + wide * (1 - sigmoid))
    return dgate.to(gate.dtype), (dout.float() * wide * sigmoid).to(up.dtype)


def _eager_gradients(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(dout * up, gate), dout * torch.nn.functional.silu(gate)


def _liger(gate: Tensor, up: Tensor) -> Callable[[], Any] | Missing:
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return NO_LIGER
    return partial(LigerSiLUMulFunction.apply, gate, up)


def _liger_backward(dout: Tensor, gate: Tensor, up: Tensor) -> Callable[[], Any] | Missing:
    """Liger overwrites gate and up; only the first call, which is compared, sees the original inputs."""
    try:
        from liger_kernel.ops.swiglu import swiglu_backward
    except ImportError:
        return NO_LIGER
    return partial(swiglu_backward, gate.clone(), up.clone(), dout)
