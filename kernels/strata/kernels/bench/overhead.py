"""What a call costs the host: Triton's bare launch and one of torch's own operations, then each of ours."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import triton

from strata.kernels.bench.cases.small import tiny_call
from strata.kernels.bench.clock import host_microseconds
from strata.kernels.compiler.ahead import compile_ahead


@triton.jit
def nothing_kernel(pointer):
    pass


def measure(ops: Iterable[str], device: torch.device) -> dict[str, float]:
    """Only of operations that can be called; why one cannot is told in its own rows."""
    x = torch.zeros(128, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "(an empty Triton kernel)": lambda: nothing_kernel[(1,)](x),
        "(torch.add)": lambda: torch.add(x, x),
    }
    calls |= {op: tiny_call(op, device) for op in ops}
    found = {}
    with torch.inference_mode():  # as a server calls them; under no_grad() torch's bookkeeping of gradients is still asked
        compile_ahead(calls.values())
        for name, call in calls.items():
            with suppress(Exception):
                found[name] = host_microseconds(call)
    return found
