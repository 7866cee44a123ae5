"""Activation checkpointing, full or selective."""

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from strata.training.model.llama import Layer

# Operators whose results are expensive to compute and small to store, unlike norms, rotations and activation functions. By name,
# because operators of unused kernels may not be registered.
SAVED_OPS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "strata::flash_attention",
    "strata::lora_projections",
}


def apply(
    model: nn.Module, mode: Literal["none", "selective", "full"], random: bool = False, kind: type[nn.Module] = Layer
) -> "Selection | None":
    """Applies activation checkpointing to each layer, a module of type `kind`. `full` stores only a layer's input; `selective`
    also stores the results of matrix products and attention. A model with dropout (`random`) repeats it in the recomputation."""
    if mode == "none":
        return None
    selection = Selection() if mode == "selective" else None
    context: dict[str, Any] = {"preserve_rng_state": random}
    if selection:
        context["context_fn"] = partial(create_selective_checkpoint_contexts, selection.policy)
    for layer in model.modules():
        if isinstance(layer, kind):
            layer.forward = partial(_recomputed, layer.forward, context)
    return selection


def _recomputed(forward: Any, context: dict[str, Any], *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    return checkpoint(forward, *inputs, use_reentrant=False, **context)


class Selection:
    """Policy of selective checkpointing. Does not store products that tensor parallelism all-reduces: the reduction is in place,
    so a stored result would be reduced twice."""

    def __init__(self) -> None:
        self._reduced = False

    def policy(self, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op.name() in SAVED_OPS and not self._reduced else CheckpointPolicy.PREFER_RECOMPUTE

    def recompute_reduced(self, model: nn.Module) -> None:
        """Excludes all-reduced products from storage. Called after DeepSpeed has replaced the layers."""
        from deepspeed.module_inject.layers import LinearAllreduce

        def inside(reduced: bool, *_: Any) -> None:
            self._reduced = reduced

        for module in model.modules():
            if isinstance(module, LinearAllreduce):
                module.register_forward_pre_hook(partial(inside, True))
                module.register_forward_hook(partial(inside, False))
