"""Memory of workers: a check before any of them starts, and the peak that was used."""

import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from strata.planner.recipes import planned_peak, warning
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.hardware.machine import available_memory
from strata.platform.recipe import ModelSection, ParallelSection, Recipe, TrainSection

if TYPE_CHECKING:
    import torch

# For workers on CPUs: glibc returns a large tensor's memory to the kernel when it is freed, and every step allocates it again,
# page by page. With freed memory retained, in large pages, a step of the laptop recipe is 10% faster.
KEEP_FREED_MEMORY = {"GLIBC_TUNABLES": f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}:glibc.malloc.hugetlb=1"}
WORKER_BASE = 700 * 2**20  # a process that has imported torch, Ray and DeepSpeed


def worker_bytes(recipe: Recipe) -> float:
    """Memory of one worker on a CPU at its fullest moment: the planner's figure and the process's own."""
    return planned_peak(recipe) + WORKER_BASE


def require_memory(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> None:
    """Raises if the workers of this machine's CPUs need more memory than is free."""
    needed, free = parallel.workers * worker_bytes(Recipe(model=model, train=train, parallel=parallel)), available_memory()
    if needed > free:
        raise UserError(
            f"Training needs about {needed / 2**30:.1f} GiB ({parallel.workers} workers); {free / 2**30:.1f} GiB are free.",
            "Make the model smaller (model.layers, model.hidden), or train.micro_batch, or raise parallel.zero.",
        )


def memory_warnings(model: ModelSection, train: TrainSection, parallel: ParallelSection, kinds: Iterable[str]) -> list[str]:
    """A warning for each kind of GPU that is too small, by plan. `kinds` are Ray's accelerator types that workers could get."""
    recipe = Recipe(model=model, train=train, parallel=parallel)
    gpus = [hardware.gpu(kind) for kind in kinds if hardware.has_gpu(kind)]
    return [line for gpu in gpus if (line := warning(recipe, gpu))]


def peak_memory(device: "torch.device") -> int:
    """Peak of this process's GPU memory in bytes, or of its resident set on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux's ru_maxrss begins at the resident set of the process that started this one, which can be larger.
    status = Path("/proc/self/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kib) * 1024
