"""Free memory of a GPU as it would be if no other process allocated any.

vLLM sizes its KV cache and estimates its CUDA graphs by differences of the GPU's free memory. Beside another engine that starts,
the differences include that engine's memory. PyTorch knows exactly what this process has allocated through it. The rest (kernels
that the driver loads, CUDA graphs that it instantiates) cannot be attributed to a process, so a fixed amount is deducted for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

OUTSIDE_TORCH = 1 << 30

Info = Callable[..., tuple[int, int]]


@dataclass(frozen=True)
class OwnMemory:
    """Memory of a GPU and of this process at one time, from which both are counted on."""

    free: int
    total: int
    reserved: int  # by PyTorch in this process

    def info(self, reserved: int) -> tuple[int, int]:
        """Free and total memory when this process has reserved that much."""
        return self.free - (reserved - self.reserved) - OUTSIDE_TORCH, self.total


def install(memory: OwnMemory, device: torch.device) -> Callable[[], None]:
    """Makes PyTorch report this process's view of the GPU. Returns the function that ends it."""
    accelerator: Any = torch.accelerator
    measured: Info = accelerator.get_memory_info

    def info(asked: Any = None, /) -> tuple[int, int]:
        return memory.info(accelerator.memory_reserved(device))

    accelerator.get_memory_info = info

    def end() -> None:
        accelerator.get_memory_info = measured

    return end
