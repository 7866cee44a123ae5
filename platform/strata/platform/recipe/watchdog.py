"""Sections of the training watchdog."""

from typing import Annotated

from pydantic import Field

from strata.platform.recipe.section import NonNegative, Positive, Section


class WatchdogSection(Section):
    """Hangs, slow ranks and corrupted replicas, each named with its rank and its node."""

    hang_s: Annotated[float, Field(ge=5, allow_inf_nan=False)] = Field(
        20.0, description="seconds without progress of any rank, or three of the run's longest intervals, that are a hang"
    )
    straggler: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        1.5, description="data and forward time of a rank over the other ranks' median, from which it is named as slow"
    )
    replace_stragglers: bool = Field(
        False, description="restarts the workers without the node of a slow rank if other nodes have free resources for them"
    )
    check_every: NonNegative = Field(
        50, description="steps between comparisons of the data-parallel replicas' parameters and gradients; 0: none"
    )


class SpikeSection(Section):
    """Rule for a step whose loss or gradient norm is not finite or far above the recent ones."""

    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        3.0, description="loss or gradient norm over the median of the last steps, from which a step is a spike"
    )
    most: Positive = Field(3, description="batches that a run may leave out; one more ends it")
