"""Activations that are computed again in the backward pass instead of being kept: time for memory."""

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from strata.training.model.llama import Layer

# What is dear to compute and cheap to keep. Norms, rotations and activations are the other way round. By name, for operators of
# kernels that a model does not use may not be there.
KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "strata::flash_attention",
}


def apply(model: nn.Module, mode: Literal["none", "selective", "full"]) -> "Selection | None":
    """Full keeps each layer's input alone; selective keeps the matrix products and attention as well."""
    if mode == "none":
        return None
    selection = Selection() if mode == "selective" else None
    context = {"context_fn": partial(create_selective_checkpoint_contexts, selection.policy)} if selection else {}
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.forward = partial(_recomputed, layer.forward, context)  # type: ignore[method-assign]
    return selection


def _recomputed(forward: Any, context: dict[str, Any], *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **context)


class Selection:
    """Which results are kept. Not the products that tensor parallelism sums over workers: it does so in place, and what was
    kept would be summed again."""

    def __init__(self) -> None:
        self._summed = False

    def policy(self, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op.name() in KEPT and not self._summed else CheckpointPolicy.PREFER_RECOMPUTE

    def spare_sums(self, model: nn.Module) -> None:
        """When DeepSpeed has put its layers in place."""
        from deepspeed.module_inject.layers import LinearAllreduce

        def inside(summed: bool, *_: Any) -> None:
            self._summed = summed

        for module in model.modules():
            if isinstance(module, LinearAllreduce):
                module.register_forward_pre_hook(partial(inside, True))
                module.register_forward_hook(partial(inside, False))
