"""Triton launches on the process's current GPU, wherever its tensors are: a kernel of tensors on another one would read memory
that is not there. torch's own operators switch over; ours do so here."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, whose first argument is a tensor, run on that tensor's GPU."""

    @wraps(kernel)
    def switched(first: torch.Tensor, *more: Any, **named: Any) -> Any:
        # A switch costs some microseconds, a look a fraction of one. Tensors without storage, which kernels are compiled with
        # where there is no GPU, are nowhere.
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return kernel(first, *more, **named)
        with torch.cuda.device(first.device):
            return kernel(first, *more, **named)

    return switched
