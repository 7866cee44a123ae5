"""Arrival counters of captured launches."""

import torch

from strata.kernels.ops import arrivals
from strata.kernels.ops.arrivals import Reserve


def test_captured_launches_have_counters_of_their_own() -> None:
    reserve = Reserve()
    assert reserve.left == 0 and reserve.take(1) is None  # nothing ran before the capture
    reserve.fill(torch.device("cpu"))
    first, second = reserve.take(3), reserve.take(5)
    assert first is not None and second is not None
    first.fill_(1)
    assert second.tolist() == [0] * 5 and reserve.left == arrivals.RESERVED - 8
    assert reserve.take(reserve.left + 1) is None
    reserve.fill(torch.device("cpu"))
    third = reserve.take(arrivals.RESERVED)
    assert third is not None and not third.any() and first.tolist() == [1] * 3  # graphs still use the first buffer
