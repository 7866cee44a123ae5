"""Code of a rank in test_logprobs.py. Ranks cannot import test modules."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from strata.platform.recipe import PreferenceSection
from strata.training.preferences.logprobs import document_logprobs, summed_over
from strata.training.preferences.losses import Documents, preference_losses

CASE = 11  # seed
TOKENS, DOCUMENTS = 12, 4
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Result = tuple[float, list[list[float]], list[list[float]]]  # loss, gradients of x and weight


def case(seed: int = CASE) -> Inputs:
    """Twelve tokens of four documents, in fp64. Slices for two and three ranks divide documents."""
    generator = torch.Generator().manual_seed(seed)
    x_nd, weight_vd = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (TOKENS, 5))
    targets_n = torch.randint(0, 5, (TOKENS,), generator=generator)
    targets_n[[0, 6]] = -100
    return x_nd, weight_vd, targets_n, torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3])


def loss_and_gradients(
    x_nd: Tensor, weight_vd: Tensor, targets_n: Tensor, document_n: Tensor, whole: Callable[[Tensor], Tensor]
) -> Result:
    x_nd, weight_vd = x_nd.requires_grad_(), weight_vd.requires_grad_()
    logp, count = document_logprobs(x_nd, weight_vd, targets_n, document_n, DOCUMENTS)
    section = PreferenceSection(loss="simpo", sft_weight=0.5)
    loss = preference_losses(section, Documents(whole(logp), whole(count))).values.sum()
    dx_nd, dweight_vd = torch.autograd.grad(loss, (x_nd, weight_vd))
    return loss.item(), dx_nd.tolist(), dweight_vd.tolist()


def on_this_rank(seed: int) -> Result:
    rank, world = dist.get_rank(), dist.get_world_size()
    x_nd, weight_vd, targets_n, document_n = case(seed)
    mine = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    summed = partial(summed_over, group=dist.group.WORLD)
    return loss_and_gradients(x_nd[mine], weight_vd, targets_n[mine], document_n[mine], summed)
