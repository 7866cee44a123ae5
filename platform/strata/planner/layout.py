"""Parallel layout of a training run."""

from dataclasses import dataclass
from typing import Literal

from strata.platform import recipe

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipev"]
TrainingPrecision = Literal["fp32", "fp16", "bf16", "fp8"]
Recompute = recipe.Recompute
Offload = recipe.Offload


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions: `data` x `tensor` x `pipeline` x `sequence` x `context` GPUs. Experts are distributed
    over `expert` of the data x sequence x context GPUs that hold the same layers. `sequence_parallel` is Megatron's: activations
    between a layer's tensor-parallel parts are split by tokens."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1  # Ulysses
    context: int = 1  # ring attention; like `sequence`, a factor of the GPUs that share a sequence
    expert: int = 1
    schedule: Schedule = "1f1b"
    interleave: int = 1  # chunks of the model a stage holds
    zero: int = 1
    micro_batch: int = 1  # sequences
    batch: int = 1  # sequences a step, over all GPUs
    recompute: Recompute = "none"
    offload: Offload = "none"
    sequence_parallel: bool = False
    precision: TrainingPrecision = "bf16"

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline * self.sequence * self.context

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.data * self.micro_batch)
