"""Recipe models: a pydantic model for each section of a recipe.

Packages receive their section, never the whole recipe. `recipe_file.py` loads files, `extends` and overrides. `make docs` writes
docs/reference/recipe.md from these models, so every field has a description.
"""

from typing import Self

from pydantic import Field, model_validator

from strata.platform.recipe.data import DataKind, DataSection, DataSetSection
from strata.platform.recipe.deploy import DeploySection
from strata.platform.recipe.model import ArchitectureSection, ModelSection, MoESection, RopeScalingSection
from strata.platform.recipe.parallel import Offload, ParallelSection, Schedule
from strata.platform.recipe.picture import CHANNELS, FlowSection, PictureSection
from strata.platform.recipe.picture_serving import PictureServingSection
from strata.platform.recipe.section import Device, Section
from strata.platform.recipe.serve import PoolSection, RemotePrefillSection, ServeSection
from strata.platform.recipe.train import (
    PROJECTIONS,
    Kernels,
    LoraSection,
    Precision,
    PreferenceLoss,
    PreferenceSection,
    Recompute,
    SamplesSection,
    TrainSection,
)
from strata.platform.recipe.watchdog import SpikeSection, WatchdogSection
from strata.platform.recipe.worker_count import WorkerCount

__all__ = [
    "CHANNELS",
    "PROJECTIONS",
    "ArchitectureSection",
    "DataKind",
    "DataSection",
    "DataSetSection",
    "DeploySection",
    "Device",
    "FlowSection",
    "Kernels",
    "LoraSection",
    "MoESection",
    "ModelSection",
    "Offload",
    "ParallelSection",
    "PictureSection",
    "PictureServingSection",
    "PoolSection",
    "Precision",
    "PreferenceLoss",
    "PreferenceSection",
    "Recipe",
    "Recompute",
    "RemotePrefillSection",
    "RopeScalingSection",
    "SamplesSection",
    "Schedule",
    "Section",
    "ServeSection",
    "SpikeSection",
    "TrainSection",
    "WatchdogSection",
    "WorkerCount",
]


class Recipe(Section):
    """All sections of a run."""

    model: ModelSection = Field(description="model shape")
    data: DataSection = Field(DataSection(), description="corpus")
    train: TrainSection = Field(description="optimization, evaluation and checkpoints")
    parallel: ParallelSection = Field(ParallelSection(), description="parallel layout")
    serve: ServeSection = Field(ServeSection(), description="endpoint")
    deploy: DeploySection = Field(DeploySection(), description="Kubernetes deployment")

    @model_validator(mode="after")
    def batch_divides(self) -> Self:
        if self.parallel.workers.elastic:  # each layout of a range has its own micro-batch
            if all(self.train.batch % data for data in self.parallel.data_sizes()):
                numbers = ", ".join(str(data) for data in self.parallel.data_sizes())
                raise ValueError(
                    f"parallel.workers={self.parallel.workers} has no layout: train.batch={self.train.batch} must be a multiple"
                    f" of the data-parallel workers ({numbers})"
                )
            return self
        share = self.parallel.data * self.train.micro_batch
        if self.train.batch % share:
            raise ValueError(
                f"train.batch={self.train.batch} must be a multiple of data-parallel workers x train.micro_batch = {share}"
            )
        return self

    @model_validator(mode="after")
    def pictures_are_trained_by_flow(self) -> Self:
        train, data = self.train, self.data
        if self.model.picture is None:
            if train.flow is not None:
                raise ValueError("train.flow trains a picture model: set model.picture, or remove it")
            return self
        if train.flow is None:
            raise ValueError("model.picture needs train.flow: {} for its defaults")
        for key in ("lora", "preference", "samples", "distill"):
            if getattr(train, key) is not None:
                raise ValueError(f"train.{key} is for language models, and model.picture is set: remove one")
        if train.freeze:
            raise ValueError("train.freeze is for language models, and model.picture is set: remove one")
        if train.kernels == "liger":
            raise ValueError("train.kernels=liger is for language models, and model.picture is set: use strata or torch")
        if data.hf or data.sets or data.kind != "text":
            raise ValueError("a picture model takes data.path, a folder of pictures with captions, or generated pictures")
        return self

    @model_validator(mode="after")
    def kernels_have_their_device(self) -> Self:
        if self.train.kernels == "liger" and self.parallel.device != "gpu":
            raise ValueError("train.kernels=liger runs on GPUs only: set it to strata or torch, or parallel.device to gpu")
        return self
