"""What a kernel's benchmark says of itself: inputs, contenders, the truth, and the least work the operation is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

OURS = "strata"


@dataclass(frozen=True)
class Missing:
    """A peer that cannot run here, and why: it keeps its row in the table."""

    reason: str


@dataclass(frozen=True)
class Contest:
    """Inputs are drawn when it is built and shared by all contenders.

    Each contender runs the operation once and returns what the reference returns. `bytes` and `flops` are the fewest that the
    operation needs, each input read and each output written once: everyone's bandwidth and TFLOP/s are counted with them.
    """

    contenders: Mapping[str, Callable[[], Any] | Missing]
    reference: Callable[[], Tensor | tuple[Tensor, ...]]
    tolerance: float
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Bar:
    """What we hold ourselves to: at least so many times that peer's speed, that share of a ceiling, or that rate."""

    least: float
    of: str  # a contender's name, "copy" (bandwidth measured in the run), "matmul" (TFLOP/s measured in the run) or "TFLOP/s"


@dataclass(frozen=True)
class Case:
    """An operation at a shape: a line of the table. `memory_limit` bounds the bytes ours may take beyond inputs and outputs."""

    op: str
    name: str
    build: Callable[[torch.device], Contest]
    bars: tuple[Bar, ...] = field(default=())
    memory_limit: int | None = None
