"""Section of the parallel layout."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from strata.platform.recipe.section import Device, Positive, Section

Schedule = Literal["1f1b", "dualpipev"]
Offload = Literal["none", "optimizer", "all"]


class ParallelSection(Section):
    """Parallel layout. Workers that remain after the tensor, pipeline and sequence dimensions are data parallel; experts are
    distributed over data-parallel workers."""

    workers: Positive = Field(1, description="worker processes; a multiple of tensor x pipeline x sequence")
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
        cut = self.tensor * self.pipeline * self.sequence
        if self.workers % cut:
            raise ValueError(f"workers={self.workers} must be a multiple of tensor x pipeline x sequence = {cut}")
        if self.data % self.expert:
            raise ValueError(f"expert={self.expert} must divide the {self.data} data-parallel workers")
        return self

    @property
    def data(self) -> int:
        """Data-parallel workers."""
        return self.workers // (self.tensor * self.pipeline * self.sequence)


# Arguments of vLLM's engine that other keys of a recipe or the endpoint itself set.
