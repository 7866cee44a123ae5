"""Section of an endpoint for pictures: replicas, the layout of a replica's workers, batches, and limits of a request."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from strata.platform.recipe.section import NonNegative, Positive, Section


class PictureServingSection(Section):
    """Endpoint of a diffusion model (a folder with model_index.json)."""

    replicas: Positive = Field(1, description="replicas; each has a group of ulysses x ring x cfg x pipefusion workers")
    ulysses: Positive = Field(1, description="workers that split the heads during attention (Ulysses)")
    ring: Positive = Field(1, description="workers that pass keys and values around a ring")
    cfg: Annotated[int, Field(ge=1, le=2)] = Field(1, description="2: the two passes of guidance run on different workers")
    pipefusion: Positive = Field(1, description="stages of blocks through which patches of the picture pass")
    patches: NonNegative = Field(0, description="patches of a picture with pipefusion; 0: as many as stages")
    step_cache: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="relative change of the first block below which a step skips the other blocks; 0: no step cache"
    )
    max_batch: Positive = Field(
        8, description="pictures of the model's own size in a batch; of larger pictures, fewer in proportion to their area"
    )
    batch_wait_ms: Annotated[float, Field(ge=0, le=1000)] = Field(
        5.0, description="longest wait of a picture for others of its size and steps, while the workers are idle"
    )
    max_queue: NonNegative = Field(64, description="pictures that may wait; further requests get 429 with Retry-After")
    steps: Positive = Field(20, description="steps of quality=medium; low takes half of them, high twice as many")
    guidance: Annotated[float, Field(ge=0, le=100)] = Field(4.0, description="guidance of requests that name none")
    max_steps: Positive = Field(100, description="most steps of a request")
    max_pictures: Positive = Field(10, description="most pictures of a request (n)")
    max_pixels: Positive = Field(2048 * 2048, description="most pixels of a picture")
    step_timeout_s: Positive = Field(
        300, description="longest step, also a first one that compiles; the workers are then restarted"
    )

    @model_validator(mode="after")
    def cache_has_all_blocks(self) -> Self:
        if self.step_cache and self.pipefusion > 1:
            raise ValueError("step_cache needs all blocks on one worker: set pipefusion=1, or step_cache=0")
        return self

    @property
    def workers(self) -> int:
        """Workers of a replica."""
        return self.ulysses * self.ring * self.cfg * self.pipefusion
