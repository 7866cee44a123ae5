"""Roofline ceilings of the device, copy bandwidth and matrix-product rate, measured in the same run as the kernels."""

from dataclasses import dataclass

import torch

from strata.kernels.bench.clock import milliseconds


@dataclass(frozen=True)
class Ceilings:
    """`copy` in bytes per second, read plus written; `matmul` in FLOP/s, on random bf16 (fp32 on CPUs) data."""

    copy: float
    matmul: float

    def share(self, bytes: int, flops: int, ms: float) -> float:
        """Fraction of the speed that the tighter ceiling allows."""
        return max(bytes / self.copy, flops / self.matmul) / (ms / 1e3)


def measure(device: torch.device, budget: float) -> Ceilings:
    on_gpu = device.type == "cuda"
    size, side = (2**30, 8192) if on_gpu else (2**26, 1024)
    source, target = (torch.ones(size, dtype=torch.int8, device=device) for _ in range(2))
    copy = 2 * size / (milliseconds(lambda: target.copy_(source), device, budget) / 1e3)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32) for _ in range(2))
    product = torch.empty_like(a)
    matmul = 2 * side**3 / (milliseconds(lambda: torch.mm(a, b, out=product), device, budget) / 1e3)
    return Ceilings(copy, matmul)
