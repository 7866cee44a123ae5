"""Base class of a recipe's sections, and the types of fields that several sections have."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Device = Literal["cpu", "gpu"]

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
