"""Definition of a benchmark case: inputs, contenders, reference, and the minimum work of the operation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

OURS = "strata"


@dataclass(frozen=True)
class Missing:
    """A peer that cannot run here, and the reason. It is still listed in the table."""

    reason: str


@dataclass(frozen=True)
class Contest:
    """Contenders with shared inputs, which are drawn when it is built.

    Each contender runs the operation once and returns what the reference returns. `bytes` and `flops` are the minimum the
    operation needs, with each input read and each output written once. The bandwidth and TFLOP/s of every contender are computed
    from them.
    """

    contenders: Mapping[str, Callable[[], Any] | Missing]
    reference: Callable[[], Tensor | tuple[Tensor, ...]]
    tolerance: float
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Bar:
    """A performance target: a minimum ratio to a peer's speed, fraction of a ceiling, or rate."""

    least: float
    of: str  # a contender's name, "copy" (bandwidth measured in the run), "matmul" (TFLOP/s measured in the run) or "TFLOP/s"


@dataclass(frozen=True)
class Case:
    """An operation at a shape. `memory_limit` bounds the bytes Strata's kernel may allocate beyond inputs and outputs."""

    op: str
    name: str
    build: Callable[[torch.device], Contest]
    bars: tuple[Bar, ...] = field(default=())
    memory_limit: int | None = None
