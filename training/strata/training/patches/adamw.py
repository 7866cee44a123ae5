"""AdamW that does not import `torch._dynamo`.

Written for: torch 2.13.
Reason: `torch.optim` imports `torch._dynamo` to keep optimizers out of compiled graphs. The import costs each worker 4 CPU
seconds before its first step. Without `torch.compile`, the undecorated methods do the same.
Delete when: `torch.optim` imports `torch._dynamo` only to compile.
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
