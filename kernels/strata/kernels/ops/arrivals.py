"""Arrival counters of kernels whose last program merges the partial results of the others."""

from functools import cache

import torch
from torch import Tensor

from strata.kernels.tuning.tunable import bucket

_arrivals: dict[tuple[torch.device, int], Tensor] = {}


def zeroed_arrivals(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def stream_arrivals(count: int, device: torch.device) -> Tensor:
    """Zeroed arrival counters. Launches of one stream run in order and reset the counters, so a stream reuses one buffer without
    a memset. A captured launch may be replayed on any stream, so it gets its own buffer, cleared by the graph."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return zeroed_arrivals(count, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    known = _arrivals.get((device, stream))
    if known is None or known.shape[0] < count:
        known = _arrivals[device, stream] = zeroed_arrivals(max(bucket(count), 2**12), device)
    return known


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
