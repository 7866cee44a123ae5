"""Gradient clipping by the norm of the whole model, where DeepSpeed's norm covers only a part of it.

Without ZeRO, DeepSpeed counts only the first stage of a pipeline, and averages the norms of expert-parallel ranks. Training
would then differ from that of one worker, and between layouts. With ZeRO, DeepSpeed reduces one parameter group after another,
and hangs if pipeline stages have different numbers of groups (only two have embeddings).
"""

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from strata.platform.recipe import ParallelSection
from strata.training.parallel import optimizer_state


def correct(engine: Any, parallel: ParallelSection) -> None:
    """Replaces the clipping methods of this engine."""
    if isinstance(engine.optimizer, torch.optim.Optimizer):

        def clip(self: Any) -> None:
            self._global_grad_norm = clip_gradients(self, parallel)

        engine.clip_fp32_gradients = MethodType(clip, engine)
    elif parallel.pipeline > 1 and hasattr(engine.optimizer, "scaled_global_norm"):
        engine.optimizer.scaled_global_norm = MethodType(_norm_in_one_reduction, engine.optimizer)


def _norm_in_one_reduction(optimizer: Any) -> Any:
    """Norm of ZeRO-1's gradients over all parameter groups, with a single reduction."""
    pairs = [
        pair
        for number, parameters in enumerate(optimizer.params_in_partition)
        for pair in zip(
            (g for g in optimizer.averaged_gradients[number] if not getattr(g, "_zero_padding", False)), parameters, strict=False
        )
    ]
    return optimizer.get_grad_norm_direct([gradient for gradient, _ in pairs], [parameter for _, parameter in pairs])


@torch.no_grad()
def clip_gradients(engine: Any, parallel: ParallelSection) -> float:
    """Clips the gradients and returns their norm before. Each element of the whole model is counted on the one rank that saves
    it. The fused optimizer divides by `grad_scale` as it reads the gradients, so clipping needs no pass over them."""
    if parallel.data == parallel.workers and parallel.expert == 1:  # every rank has all gradients
        norm = nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
    else:
        squares = torch.zeros((), device=engine.device)
        for slot in optimizer_state.owned(engine, parallel):
            gradient = slot.parameter.grad
            assert gradient is not None
            squares += torch.linalg.vector_norm(gradient.view(-1).narrow(0, slot.start, slot.count)).float() ** 2
        dist.all_reduce(squares)
        norm = squares.sqrt()
    engine.optimizer.grad_scale = ((norm + 1e-6) / engine.gradient_clipping()).clamp(min=1)
    return norm.item()
