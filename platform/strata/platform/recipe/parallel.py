"""Section of the parallel layout."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strata.platform.recipe.section import Device, Positive, Section
from strata.platform.recipe.worker_count import WorkerCount

Schedule = Literal["1f1b", "dualpipev"]
Offload = Literal["none", "optimizer", "all"]


class ParallelSection(Section):
    """Parallel layout. Workers that remain after the tensor, pipeline and sequence dimensions are data parallel; experts are
    distributed over data-parallel workers."""

    workers: WorkerCount = Field(
        WorkerCount(1),
        description="worker processes; a multiple of tensor x pipeline x sequence. A range such as 4..8 makes the run elastic",
    )
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        1, description="ZeRO stage: 1 shards the optimizer state, 2 the gradients too, 3 the parameters too"
    )
    tensor: Positive = Field(1, description="tensor-parallel workers (Megatron's column and row split)")
    pipeline: Positive = Field(1, description="pipeline stages")
    schedule: Schedule = Field("1f1b", description="pipeline schedule")
    sequence: Positive = Field(1, description="sequence-parallel workers (Ulysses)")
    expert: Positive = Field(1, description="expert-parallel workers; divides the data-parallel workers")
    offload: Offload = Field("none", description="state in host memory; optimizer: optimizer state, all: parameters too")
    device: Device = Field("cpu", description="device of the workers")
    cpus_per_worker: Positive = Field(1, description="CPU cores of a worker")

    @model_validator(mode="after")
    def workers_divide(self) -> Self:
        if self.workers.elastic:
            if not any(self.data_sizes()):
                factors = f"tensor x pipeline x sequence x expert = {self.cut * self.expert}"
                raise ValueError(f"workers={self.workers} has no multiple of {factors}")
            return self
        if self.workers % self.cut:
            raise ValueError(f"workers={self.workers} must be a multiple of tensor x pipeline x sequence = {self.cut}")
        if self.data % self.expert:
            raise ValueError(f"expert={self.expert} must divide the {self.data} data-parallel workers")
        return self

    @property
    def cut(self) -> int:
        """Workers of one data-parallel replica."""
        return self.tensor * self.pipeline * self.sequence

    @property
    def data(self) -> int:
        """Data-parallel workers; of a range, those of its largest number."""
        return self.workers // self.cut

    def data_sizes(self) -> Iterator[int]:
        """Data-parallel workers for each number of workers that the dimensions divide, the largest first."""
        return (size // self.cut for size in self.workers.sizes() if size % (self.cut * self.expert) == 0)


# Arguments of vLLM's engine that other keys of a recipe or the endpoint itself set.
