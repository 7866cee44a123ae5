"""Messages between a replica and its workers, over pipes. No torch here: the replica does not import it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from strata.serving.api.pictures import PictureModel


@dataclass(frozen=True)
class Wanted:
    """One picture of a batch."""

    prompt: str
    negative: str
    width: int
    height: int
    steps: int
    guidance: float
    seed: int


@dataclass(frozen=True)
class Batch:
    """Sent to every worker. `partials`: places in the batch of the pictures to send after a step."""

    number: int
    pictures: tuple[Wanted, ...]
    partials: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Cancel:
    """Sent to worker 0."""

    number: int  # of the batch


# Sent by worker 0.


@dataclass(frozen=True)
class Ready:
    model: PictureModel
    guides_twice: bool  # guidance runs the model with and without the prompt


@dataclass(frozen=True)
class Unusable:
    """The model cannot be served with these settings; another start would end the same way."""

    cause: str
    fix: str


@dataclass(frozen=True)
class Step:
    step: int
    seconds: float
    partials: Mapping[int, np.ndarray]


@dataclass(frozen=True)
class Done:
    pictures: tuple[np.ndarray, ...]
    text_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Stopped:
    """The batch was cancelled."""


@dataclass(frozen=True)
class Refused:
    """The request is at fault; the workers go on."""

    reason: str


FromWorker = Ready | Unusable | Step | Done | Stopped | Refused
