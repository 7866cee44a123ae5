"""Host time of a call: an empty Triton kernel and torch.add as baselines, then each of Strata's operations."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import triton

from strata.kernels.bench.cases.small import tiny_call
from strata.kernels.bench.clock import host_microseconds
from strata.kernels.compiler.ahead import compile_ahead


@triton.jit
def empty_kernel(pointer):
    pass


def measure(ops: Iterable[str], device: torch.device) -> dict[str, float]:
    """Host microseconds by operation. Operations that raise are left out here; their own rows report the reason."""
    x = torch.zeros(128, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "(an empty Triton kernel)": lambda: empty_kernel[(1,)](x),
        "(torch.add)": lambda: torch.add(x, x),
    }
    calls |= {op: tiny_call(op, device) for op in ops}
    found = {}
    with torch.inference_mode():  # as in a server; under no_grad(), torch still does autograd bookkeeping
        compile_ahead(calls.values())
        for name, call in calls.items():
            with suppress(Exception):
                found[name] = host_microseconds(call)
    return found
