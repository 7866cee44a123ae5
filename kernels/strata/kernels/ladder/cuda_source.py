"""CUDA C++ steps: source files of `cuda/`, compiled at their first call, by nvcc where it is installed, else by torch's NVRTC.

NVRTC comes with torch, but torch's binding of it still looks for an installation of CUDA.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata.kernels.ladder.nvcc import compile_cuda, nvcc

FOLDER = Path(__file__).parent / "cuda"


@dataclass(frozen=True)
class CudaSource:
    """A kernel, named after its file. A block of `threads` computes a tile of the output."""

    name: str
    threads: tuple[int, int, int]
    tile: tuple[int, int]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.cu"

    def grid(self, rows: int, columns: int) -> tuple[int, int, int]:
        return -(-columns // self.tile[1]), -(-rows // self.tile[0]), 1

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        (rows, inner), columns = a.shape, b.shape[1]
        with torch.cuda.device(out.device):
            kernel = _compiled(self.path, out.device)
            kernel(self.grid(rows, columns), self.threads, [a, b, out, rows, columns, inner])


@cache
def _compiled(path: Path, device: torch.device) -> Callable[..., Any]:
    """A module is loaded into the context of one device, which is the current one."""
    from torch.cuda._utils import _cuda_load_module

    if nvcc() is None:
        kernel: Callable[..., Any] = torch.cuda._compile_kernel(path.read_text(), path.stem, cuda_include_dirs=[str(FOLDER)])
        return kernel
    major, minor = torch.cuda.get_device_capability(device)
    module: Any = _cuda_load_module(compile_cuda(path, major * 10 + minor).cubin, [path.stem])
    kernel = module[path.stem]
    return kernel


SOURCES = {
    source.name: source
    for source in (
        CudaSource("naive", (32, 32, 1), (32, 32)),
        CudaSource("coalesced", (32, 32, 1), (32, 32)),
        CudaSource("shared_tiles", (32, 32, 1), (32, 32)),
        CudaSource("register_tiles", (256, 1, 1), (128, 128)),
        CudaSource("tensor_cores", (256, 1, 1), (128, 128)),
    )
}
