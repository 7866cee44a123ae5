"""Peak rate of this machine's CPU: the rate that matrix products reach."""

import time
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

SIZES = (256, 512, 1024)  # the size that suits the caches best differs from CPU to CPU
SECONDS_A_SIZE = 0.1


@cache
def measured(precision: Literal["fp32", "bf16"], threads: int, matmul: str) -> float:
    """Best of many products, as other processes use the machine too. `matmul` is torch's state: an argument for the cache."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_best_of(size, torch.bfloat16 if precision == "bf16" else torch.float32) for size in SIZES)
    finally:
        torch.set_num_threads(before)


def _best_of(size: int, dtype: "torch.dtype") -> float:
    import torch

    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    a @ b  # the first product chooses and compiles a kernel
    fastest, deadline = float("inf"), time.perf_counter() + SECONDS_A_SIZE
    while time.perf_counter() < deadline:
        begin = time.perf_counter()
        a @ b
        fastest = min(fastest, time.perf_counter() - begin)
    return 2 * size**3 / fastest
