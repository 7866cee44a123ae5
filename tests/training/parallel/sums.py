"""What a rank of test_shared_memory.py does; ranks can only import what is not a test."""

import torch
import torch.distributed as dist
from torch import nn

from strata.training.parallel.shared_memory import SharedSum, reachable

SIZES = (5, 700, 1, 64, 300)


def sum_on_this_rank(desk_bytes: int) -> tuple[bool, list[list[float]]]:
    """Twice, for the memory is used again."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    shared = SharedSum(dist.group.WORLD, parameters, desk_bytes)
    sums = []
    for turn in range(2):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 10.0**number * (dist.get_rank() + 1 + turn))
        shared.add_up()
        sums.append([p.grad.mean().item() for p in parameters if p.grad is not None])
    return reachable(None), sums
