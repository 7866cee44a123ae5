"""Code of a rank in test_shared_memory.py. Ranks cannot import test modules."""

import torch
import torch.distributed as dist
from torch import nn

from strata.training.parallel.shared_memory import SharedSum, reachable

SIZES = (5, 700, 1, 64, 300)


def sum_on_this_rank(bucket_bytes: int) -> tuple[bool, list[list[float]]]:
    """Sums twice, because the buffers are reused."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    shared = SharedSum(dist.group.WORLD, parameters, bucket_bytes)
    sums = []
    for repeat in range(2):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 10.0**number * (dist.get_rank() + 1 + repeat))
        shared.all_reduce()
        sums.append([p.grad.mean().item() for p in parameters if p.grad is not None])
    return reachable(None), sums
