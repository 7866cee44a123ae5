"""The norm that gradients are clipped by, where DeepSpeed's own would not be that of the whole model.

Without ZeRO it counts, of a pipeline, the first stage alone, and averages over ranks what expert parallelism has spread over
them: training would not be that of one worker, and differently so in every layout. With ZeRO it reduces group by group of
parameters, and waits for ever where a pipeline's stages have not as many groups as each other (only two have embeddings).
"""

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from strata.platform.recipe import ParallelSection
from strata.training.parallel import optimizer_state


def correct(engine: Any, parallel: ParallelSection) -> None:
    """By the methods that DeepSpeed calls, on this engine alone."""
    if isinstance(engine.optimizer, torch.optim.Optimizer):

        def clip(self: Any) -> None:
            self._global_grad_norm = clip_gradients(self, parallel)

        engine.clip_fp32_gradients = MethodType(clip, engine)
    elif parallel.pipeline > 1 and hasattr(engine.optimizer, "scaled_global_norm"):
        engine.optimizer.scaled_global_norm = MethodType(_norm_in_one_reduction, engine.optimizer)


def _norm_in_one_reduction(optimizer: Any) -> Any:
    """Of ZeRO-1's gradients, all groups of parameters together."""
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
    """Each element of the whole model is counted by the one rank that would save it. The fused optimizer divides by
    `grad_scale` while it reads the gradients: no pass over them is spent on clipping."""
    squares = torch.zeros((), device=engine.device)
    for slot in optimizer_state.owned(engine, parallel):
        gradient = slot.parameter.grad
        assert gradient is not None
        squares += torch.linalg.vector_norm(gradient.view(-1).narrow(0, slot.start, slot.count)).float() ** 2
    dist.all_reduce(squares)
    norm = squares.sqrt()
    engine.optimizer.grad_scale = ((norm + 1e-6) / engine.gradient_clipping()).clamp(min=1)
    return norm.item()
