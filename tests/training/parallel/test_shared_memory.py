"""All-reduce of gradients in shared memory."""

import pytest

from .ranks import on_ranks
from .sums import SIZES, sum_on_this_rank


@pytest.mark.parametrize("bucket_bytes", [4, 1000, 1 << 20])
def test_every_worker_has_the_sum(bucket_bytes: int) -> None:
    world = 3
    for same_machine, sums in on_ranks(world, sum_on_this_rank, bucket_bytes):
        assert same_machine
        for repeat, means in enumerate(sums):
            total = sum(rank + 1 + repeat for rank in range(world))
            assert means == pytest.approx([total * 10.0**number for number in range(len(SIZES))])
