"""Profiles by NVIDIA's own programs: Nsight Systems (nsys) for timelines, Nsight Compute (ncu) for single kernels.

A worker runs under the program from its start. The program records the requested steps: it begins and ends with CUDA's profiler
API. torch's profiler cannot run beside it, because a process has one client of CUPTI.
"""

import shutil
from pathlib import Path
from typing import Any, Literal, get_args

from strata.platform.errors import UserError
from strata.platform.recipe import Recipe

Tool = Literal["torch", "nsys", "ncu"]
INSTALL = {
    "nsys": "Install Nsight Systems: 'apt install nsight-systems-cli' from NVIDIA's repository, "
    "or https://developer.nvidia.com/nsight-systems.",
    "ncu": "Install Nsight Compute: it is part of the CUDA toolkit, or https://developer.nvidia.com/nsight-compute.",
}
OPTIONS = {
    "nsys": (
        "profile",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--trace=cuda,nvtx,cublas,osrt",
        "--force-overwrite=true",
    ),
    "ncu": ("--profile-from-start", "off", "--nvtx", "--force-overwrite"),
}
REPORTS = {"nsys": "nsys-rep", "ncu": "ncu-rep"}  # ends of file names


def parse(text: str) -> Tool:
    if found := [tool for tool in get_args(Tool) if tool == text]:
        return found[0]  # type: ignore[no-any-return]
    raise UserError(f"There is no profiler '{text}'.", f"Choose one of {', '.join(get_args(Tool))}.")


def command(tool: Tool, recipe: Recipe, folder: Path) -> tuple[str, ...]:
    """Words before a worker's own command; none for torch's profiler. The report is named after the rank."""
    if tool == "torch":
        return ()
    program = shutil.which(tool)
    if program is None:
        raise UserError(f"{tool} is not on PATH.", INSTALL[tool])
    if recipe.parallel.device != "gpu":
        raise UserError(f"{tool} profiles GPUs, and the recipe has parallel.device=cpu.", "Use torch's profiler: omit --tool.")
    if tool == "ncu" and recipe.parallel.workers > 1:
        cause = f"ncu runs every kernel several times, and collectives of parallel.workers={recipe.parallel.workers} would hang."
        raise UserError(cause, "Set parallel.workers=1, or use --tool nsys.")
    return (program, *OPTIONS[tool], "-o", f"{folder}/rank%q{{RANK}}")


class CudaProfile:
    """Recording by the program that a worker runs under, with the methods of torch's profiler. Operators and ranges become NVTX
    ranges. It needs no step of warm-up, so it begins with the second one."""

    def __init__(self) -> None:
        import torch

        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._nvtx = torch.autograd.profiler.emit_nvtx(record_shapes=True)  # type: ignore[no-untyped-call]
        self._running = False

    def start(self) -> None:
        pass

    def step(self) -> None:
        if not self._running:
            self._running = True
            self._cudart.cudaProfilerStart()
            self._nvtx.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        if self._running:
            self._running = False
            self._nvtx.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._cudart.cudaProfilerStop()
