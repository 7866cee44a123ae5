"""torch's AdamW without `torch.compile`'s tracer, whose import takes each worker 4 seconds of a core before its first step.

torch imports the tracer to keep an optimizer out of compiled graphs. Where nothing is compiled, the methods under its
decorators do the same. Written for torch 2.13; not needed once `torch.optim` imports `torch._dynamo` only to compile.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer


class EagerAdamW(AdamW):
    add_param_group = Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    zero_grad = Optimizer.zero_grad.__wrapped__  # type: ignore[attr-defined]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return Adam.step.__wrapped__(self, closure)  # type: ignore[attr-defined]
