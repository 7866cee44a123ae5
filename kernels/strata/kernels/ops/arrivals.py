"""Arrival counters of kernels whose last program merges the partial results of the others.

The last program resets the counters of its launch, so they are zeroed once, when they are allocated. Launches of one stream run
in order and share a buffer. A captured launch may be replayed on any stream and has counters of its own, from a buffer that an
earlier launch outside of captures reserved: a memset in front of each kernel of a graph would take as long as a small kernel.
"""

from functools import cache

import torch
from torch import Tensor

from strata.kernels.tuning.tunable import bucket

RESERVED = 2**20  # counters for captures, 4 MiB: those of the graphs of a model with 100 launches, at 50 batch sizes

_arrivals: dict[tuple[torch.device, int], Tensor] = {}


class Reserve:
    """Counters for captured launches. Graphs keep their addresses, so buffers are never freed."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0

    @property
    def left(self) -> int:
        return self._buffers[-1].shape[0] - self._used if self._buffers else 0

    def fill(self, device: torch.device) -> None:
        """Outside of captures only: in a capture, zeroing would become a part of the graph."""
        self._buffers.append(zeroed_arrivals(RESERVED, device))
        self._used = 0

    def take(self, count: int) -> Tensor | None:
        if self.left < count:
            return None
        self._used += count
        return self._buffers[-1][self._used - count : self._used]


_reserves: dict[torch.device, Reserve] = {}


def zeroed_arrivals(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def stream_arrivals(count: int, device: torch.device) -> Tensor:
    """Zeroed arrival counters of a launch on the current stream."""
    if device.type != "cuda":
        return zeroed_arrivals(count, device)
    reserve = _reserves.setdefault(device, Reserve())
    if torch.cuda.is_current_stream_capturing():
        taken = reserve.take(count)
        return zeroed_arrivals(count, device) if taken is None else taken
    if reserve.left < RESERVED // 2:
        reserve.fill(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    known = _arrivals.get((device, stream))
    if known is None or known.shape[0] < count:
        known = _arrivals[device, stream] = zeroed_arrivals(max(bucket(count), 2**12), device)
    return known


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
