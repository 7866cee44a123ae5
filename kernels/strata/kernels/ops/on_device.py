"""Switches to the GPU of the input tensors before a Triton launch.

Triton launches on the current device of the process. A kernel on tensors of another GPU would read invalid memory. torch's own
operators switch devices; this module does the same for Strata's.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def on_tensor_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `kernel`, whose first argument is a tensor, on the GPU of that tensor."""

    @wraps(kernel)
    def switched(first: torch.Tensor, *more: Any, **named: Any) -> Any:
        # The check takes a fraction of a microsecond, a switch takes several. Meta tensors, used to compile without a GPU, are on
        # no device.
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return kernel(first, *more, **named)
        with torch.cuda.device(first.device):
            return kernel(first, *more, **named)

    return switched
