"""Models of the benchmark's peers. Each module's forward pass includes the loss, so torch.compile covers it too."""

from typing import Any

import torch
from torch import Tensor, nn

from strata.platform.recipe import Recipe
from strata.training.bench.contest import accumulation
from strata.training.model import balance, huggingface
from strata.training.model.llama import Llama, token_losses


class WithLoss(nn.Module):
    """Mean loss of rows without padding, which are one document each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor, positions_bt: None = None, count: float = 0.0) -> Tensor:
        return token_losses(self.model(tokens_bt), targets_bt).mean()


class WithFusedLoss(WithLoss):
    """Liger fuses the loss with the output layer and never materializes the full logits."""

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor, positions_bt: None = None, count: float = 0.0) -> Tensor:
        targets_bt = targets_bt.contiguous()  # Liger flattens them with view
        loss: Tensor = self.model(input_ids=tokens_bt, labels=targets_bt, shift_labels=targets_bt, use_cache=False).loss
        return loss


def bare(recipe: Recipe, device: torch.device) -> nn.Module:
    llama = Llama(recipe.model, recipe.train.seed, kernels="torch").to(device, dtype_of(recipe))
    balance.attach(llama, recipe.model, scale=1 / accumulation(recipe))
    module = WithLoss(llama)
    if recipe.train.compile:
        module.compile()
    return module


def liger(recipe: Recipe, device: torch.device, compiled: bool) -> nn.Module:
    """Hugging Face's Llama with Liger's kernels. torch.compile is applied layer by layer: compiling the whole model ended in an
    illegal memory access (Liger 0.8.2, torch 2.11, H200). Compiled and eager are both benchmarked, whatever `train.compile` is,
    because either can be faster."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found,unused-ignore]

    apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=True)
    llama = hugging_face(recipe).to(device)
    if compiled:
        for layer in llama.model.layers:
            layer.compile()
    return WithFusedLoss(llama)


def hugging_face(recipe: Recipe) -> Any:
    """Hugging Face's Llama with the initial weights of Strata's model. Created in its precision rather than cast, because a cast
    would include the rotary angles."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**huggingface.config(recipe.model))
    llama = AutoModelForCausalLM.from_config(config, dtype=dtype_of(recipe), attn_implementation="sdpa")
    llama.load_state_dict(Llama(recipe.model, recipe.train.seed, kernels="torch").state_dict())
    return llama.train()


def dtype_of(recipe: Recipe) -> torch.dtype:
    return torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
