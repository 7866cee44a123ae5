"""The steps in order, and the call that multiplies with one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from strata.kernels.ladder.cuda_source import SOURCES

ALIGNED = 8  # bf16 elements in 16 bytes


@dataclass(frozen=True)
class Step:
    """A step, named after its file. `reads` is the tile whose operands are read once per block of threads: its operations per
    byte read. `aligned`: rows must begin at multiples of 16 bytes. `arch`: the only architecture that has its instructions."""

    name: str
    language: str
    title: str
    reads: tuple[int, int]
    aligned: bool = False
    arch: int | None = None

    @property
    def path(self) -> Path:
        return SOURCES[self.name].path if self.name in SOURCES else Path(__file__).with_name(f"{self.name}.py")

    @property
    def intensity(self) -> float:
        """Operations per byte of bf16 operands that a block of threads reads from the L2 cache or beyond."""
        rows, columns = self.reads
        return rows * columns / (rows + columns)

    def launch(self) -> Callable[[Tensor, Tensor, Tensor], None]:
        """`multiply(a, b, out)` of the step. Imports Triton for the steps that need it."""
        if self.name in SOURCES:
            return SOURCES[self.name].multiply
        launch: Callable[[Tensor, Tensor, Tensor], None] = import_module(f"strata.kernels.ladder.{self.name}").multiply
        return launch


STEPS = (
    Step("naive", "CUDA C++", "one thread per element", (1, 1)),
    Step("coalesced", "CUDA C++", "neighbouring threads, neighbouring addresses", (1, 1)),
    Step("shared_tiles", "CUDA C++", "tiles in shared memory", (32, 32)),
    Step("register_tiles", "CUDA C++", "tiles in registers, 128-bit loads", (128, 128), aligned=True),
    Step("tensor_cores", "CUDA C++", "mma.sync and two buffers", (128, 128), aligned=True),
    Step("no_dot", "Triton", "a tile per program, no tensor cores", (64, 64)),
    Step("dot", "Triton", "tl.dot", (64, 64)),
    Step("pipelined", "Triton", "large tiles, three stages", (128, 256)),
    Step("l2_order", "Triton", "order of tiles for the L2 cache", (128, 256)),
    Step("tma_persistent", "Triton", "TMA, one program per SM", (128, 256), aligned=True),
    Step("warp_specialized", "Gluon", "a loading warp, two multiplying warpgroups", (128, 256), aligned=True, arch=90),
)


def matmul(step: str, a: Tensor, b: Tensor) -> Tensor:
    """a [rows, inner] times b [inner, columns] by a step of the ladder, accumulated in fp32."""
    [found] = [one for one in STEPS if one.name == step]
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"matmul multiplies two matrices of one dtype on one device, got {tuple(a.shape)} and {tuple(b.shape)}")
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    prepared(found, a, b, out)()
    return out


def prepared(step: Step, a: Tensor, b: Tensor, out: Tensor) -> Callable[[], None]:
    """The call that multiplies into `out`; raises ValueError if the step does not support these tensors."""
    if 0 in (*a.shape, *b.shape):
        raise ValueError(f"{step.name} needs matrices with elements, got {tuple(a.shape)} and {tuple(b.shape)}")
    if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"{step.name} needs contiguous matrices")
    if step.aligned and (a.shape[1] % ALIGNED or b.shape[1] % ALIGNED):
        raise ValueError(f"{step.name} needs rows of a multiple of {ALIGNED} elements, got {a.shape[1]} and {b.shape[1]}")
    if step.language != "Triton" and a.dtype != torch.bfloat16:
        raise ValueError(f"{step.name} multiplies bf16, got {a.dtype}")
    if step.arch and a.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(a.device)
        if major * 10 + minor != step.arch:
            raise ValueError(f"{step.name} needs sm_{step.arch}, this GPU is sm_{major}{minor}")
    return partial(step.launch(), a, b, out)
