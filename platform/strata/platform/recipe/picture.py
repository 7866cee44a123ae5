"""Sections of picture models: the shape beside that of the transformer, and training by flow matching."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from strata.platform.recipe.section import NonNegative, Positive, Section

CHANNELS = 3  # red, green, blue
LEAST_PATCHES = 16  # of a picture, as a model's least context
LEAST_SPECIAL = 4  # tokens of a caption's frame: padding, begin, unknown and end


class PictureSection(Section):
    """Text-to-image diffusion transformer (MMDiT, as Stable Diffusion 3) on pixels, with a CLIP text encoder trained with it."""

    size: Positive = Field(32, description="width and height of a picture, in pixels; a multiple of patch")
    patch: Positive = Field(4, description="width and height of a patch, which is one token")
    caption_tokens: Annotated[int, Field(ge=LEAST_SPECIAL)] = Field(
        16, description="tokens of a caption with its begin and end; longer ones are cut"
    )
    text_layers: Positive = Field(2, description="layers of the text encoder")
    text_hidden: Positive = Field(64, description="width of the text encoder; a multiple of 32, the width of its heads")

    @model_validator(mode="after")
    def sizes_divide(self) -> Self:
        if self.size % self.patch:
            raise ValueError(f"size={self.size} must be a multiple of patch={self.patch}")
        if self.patches < LEAST_PATCHES:
            raise ValueError(f"size={self.size} and patch={self.patch} make {self.patches} patches, fewer than {LEAST_PATCHES}")
        if self.text_hidden % 32:
            raise ValueError(f"text_hidden={self.text_hidden} must be a multiple of 32")
        return self

    @property
    def patches(self) -> int:
        """Patches of a picture."""
        return (self.size // self.patch) ** 2


class FlowSection(Section):
    """Flow matching: the model learns the velocity from data to noise. Pictures are drawn with the averaged weights."""

    logit_mean: Annotated[float, Field(allow_inf_nan=False)] = Field(
        0.0, description="mean of the logit-normal distribution of timesteps; above 0: more noise"
    )
    logit_std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="standard deviation of the logit-normal distribution of timesteps"
    )
    caption_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="share of captions replaced by the empty one, for classifier-free guidance"
    )
    average: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.999, description="decay of the moving average of the weights, which is exported; 0: the weights themselves"
    )
    prompts: tuple[str, ...] = Field((), description="captions drawn at every evaluation; none: held-out captions of the data")
    sample_steps: Positive = Field(20, description="steps of the sampler")
    guidance: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        3.0, description="scale of classifier-free guidance; 1: none"
    )
    judged: NonNegative = Field(
        64, description="pictures of held-out captions that are judged at the end of a run on generated pictures; 0: none"
    )
