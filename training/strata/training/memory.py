"""Will it fit? A first-order answer before any worker starts, so that a model that is far too large costs nothing; and what it
took when it ran."""

import resource
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from strata.planner.catalogue import library
from strata.planner.recipes import warning
from strata.platform.errors import UserError
from strata.platform.machine import available_memory
from strata.platform.recipe import ModelSection, ParallelSection, Recipe, TrainSection
from strata.training.model.llama import count_parameters

if TYPE_CHECKING:
    import torch

# For workers on CPUs: glibc hands a large tensor's memory back to the kernel when it is freed, and every step takes it again,
# page by page. Kept, and in large pages, a step of the laptop recipe is a tenth quicker.
KEEP_FREED_MEMORY = {"GLIBC_TUNABLES": f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}:glibc.malloc.hugetlb=1"}
WORKER_BASE = 700 * 2**20  # a process that has imported torch, Ray and DeepSpeed


def worker_bytes(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> int:
    """Weights, gradients and Adam's two moments (and an fp32 copy of bf16 weights), divided as the layout and the ZeRO stage
    divide them, and the activations of the micro-batches in flight: about 20 numbers of hidden width a layer and token (one
    where layers are recomputed), and the logits three times."""
    experts = model.layers * model.moe.experts * 3 * model.hidden * model.ffn if model.moe else 0
    parameters = (count_parameters(model) - experts + experts / parallel.expert) / (parallel.tensor * parallel.pipeline)
    width = 4 if train.precision == "fp32" else 2
    optimizer = 8 if train.precision == "fp32" else 12
    sharers = parallel.data * parallel.sequence
    state = parameters * (
        width / (sharers if parallel.zero >= 3 else 1)
        + width / (sharers if parallel.zero >= 2 else 1)
        + optimizer / (sharers if parallel.zero >= 1 else 1)
    )
    tokens = train.micro_batch * model.context / parallel.sequence
    layer = model.hidden if train.recompute == "full" else (20 * model.hidden + 4 * _active_ffn(model)) / parallel.tensor
    # A pipeline's first stage has as many micro-batches in flight as there are stages: together, one whole model's layers.
    activations = tokens * width * model.layers * layer + 3 * 4 * tokens * model.vocab
    return int(state + activations) + WORKER_BASE


def _active_ffn(model: ModelSection) -> int:
    return model.moe.top_k * model.ffn + model.moe.shared_ffn if model.moe else model.ffn


def require_memory(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> None:
    """For workers on this machine's CPUs."""
    needed, free = parallel.workers * worker_bytes(model, train, parallel), available_memory()
    if needed > free:
        raise UserError(
            f"Training needs about {needed / 2**30:.1f} GiB ({parallel.workers} workers); {free / 2**30:.1f} GiB are free.",
            "Make the model smaller (model.layers, model.hidden), or train.micro_batch, or raise parallel.zero.",
        )


def misfits(model: ModelSection, train: TrainSection, parallel: ParallelSection, kinds: Iterable[str]) -> list[str]:
    """What the planner says of GPUs that workers could land on, by Ray's names for them: a line for each that is too small."""
    recipe = Recipe(model=model, train=train, parallel=parallel)
    gpus = [library.gpu(kind) for kind in kinds if library.has_gpu(kind)]
    return [line for gpu in gpus if (line := warning(recipe, gpu))]


def peak_memory(device: "torch.device") -> int:
    """The most this process has held so far: of its GPU, or without one in all, which Linux counts in KiB and macOS in bytes."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
