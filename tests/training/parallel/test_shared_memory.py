"""Gradients that workers of one machine add up in its memory."""

import pytest

from .ranks import on_ranks
from .sums import SIZES, sum_on_this_rank


@pytest.mark.parametrize("desk_bytes", [4, 1000, 1 << 20])
def test_every_worker_gets_the_sum(desk_bytes: int) -> None:
    world = 3
    for same_machine, sums in on_ranks(world, sum_on_this_rank, desk_bytes):
        assert same_machine
        for turn, means in enumerate(sums):
            total = sum(rank + 1 + turn for rank in range(world))
            assert means == pytest.approx([total * 10.0**number for number in range(len(SIZES))])
