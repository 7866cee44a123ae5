"""Will it fit? A first-order answer before any worker starts, so that a model that is far too large costs nothing."""

from strata.platform.errors import UserError
from strata.platform.machine import available_memory
from strata.platform.recipe import ModelSection, ParallelSection, TrainSection
from strata.training.model import count_parameters

WORKER_BASE = 700 * 2**20  # a process that has imported torch, Ray and DeepSpeed


def worker_bytes(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> int:
    """Weights, gradients and Adam's two moments (and an fp32 copy of bf16 weights), each divided as the ZeRO stage divides it,
    and the activations of one micro-batch: about 20 numbers of hidden width a layer and token, and the logits three times."""
    parameters = count_parameters(model)
    width = 4 if train.precision == "fp32" else 2
    optimizer = 8 if train.precision == "fp32" else 12
    workers = parallel.workers
    state = parameters * (
        width / (workers if parallel.zero >= 3 else 1)
        + width / (workers if parallel.zero >= 2 else 1)
        + optimizer / (workers if parallel.zero >= 1 else 1)
    )
    tokens = train.micro_batch * model.context
    activations = tokens * width * (model.layers * (20 * model.hidden + 4 * model.ffn)) + 3 * 4 * tokens * model.vocab
    return int(state + activations) + WORKER_BASE


def require_memory(model: ModelSection, train: TrainSection, parallel: ParallelSection) -> None:
    """For workers on this machine's CPUs."""
    needed, free = parallel.workers * worker_bytes(model, train, parallel), available_memory()
    if needed > free:
        raise UserError(
            f"Training needs about {needed / 2**30:.1f} GiB ({parallel.workers} workers); {free / 2**30:.1f} GiB are free.",
            "Make the model smaller (model.layers, model.hidden), or train.micro_batch, or raise parallel.zero.",
        )
