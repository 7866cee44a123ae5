"""Hugging Face's model of a folder, with peft's adapters and Liger's kernels, as a benchmark's peer."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strata.platform.recipe import LoraSection, Recipe
from strata.training.bench.models import dtype_of
from strata.training.model.rope import document_bounds

ATTENTION = "packed"


class WithLoss(nn.Module):
    """The model's loss of packed rows. Documents are flattened into one row, as flash attention takes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor, positions_bt: Tensor, count: float) -> Tensor:
        longest = tokens_bt.shape[1]
        tokens_1n, targets_1n, positions_1n = (x.reshape(1, -1) for x in (tokens_bt, targets_bt, positions_bt))
        bounds = document_bounds(positions_1n)
        packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        loss: Tensor = self.model(
            input_ids=tokens_1n,
            position_ids=positions_1n,
            labels=targets_1n,
            shift_labels=targets_1n,
            num_items_in_batch=count,
            use_cache=False,
            **packed,
        ).loss
        return loss


def hugging_face(recipe: Recipe, device: torch.device, liger: bool, compiled: bool) -> nn.Module:
    """The model of `model.from` in the recipe's precision. On a GPU it has torch's flash attention for packed documents,
    the fastest that needs no further package. torch.compile is applied layer by layer, as in Strata."""
    from transformers import AutoModelForCausalLM

    maker = AutoModelForCausalLM
    if liger:
        from liger_kernel.transformers import AutoLigerKernelForCausalLM  # type: ignore[import-not-found,unused-ignore]

        maker = AutoLigerKernelForCausalLM
    if device.type == "cuda":
        _register_attention()
    assert recipe.model.source
    attention = ATTENTION if device.type == "cuda" else "sdpa"
    model = maker.from_pretrained(Path(recipe.model.source), dtype=dtype_of(recipe), attn_implementation=attention).to(device)
    layers = model.model.layers
    if recipe.train.lora:
        model = _adapted(model, recipe.train.lora)
    if compiled:
        for layer in layers:
            layer.compile()
    return WithLoss(model.train())


def _adapted(model: Any, lora: LoraSection) -> Any:
    """The model with peft's adapters, in the model's precision: peft would compute in fp32 otherwise, which is slower."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), lora_dropout=lora.dropout, target_modules=list(lora.targets))
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def _register_attention() -> None:
    """Makes torch's variable-length flash attention available to transformers, which otherwise needs flash-attn for it."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: Any,
        q_1hne: Tensor,
        k_1kne: Tensor,
        v_1kne: Tensor,
        _: None,
        scaling: float,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        **__: Any,
    ) -> tuple[Tensor, None]:
        q_nhe, k_nke, v_nke = (x.transpose(1, 2).squeeze(0) for x in (q_1hne, k_1kne, v_1kne))
        y_nhe = varlen_attn(
            *(q_nhe, k_nke, v_nke, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q),
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=q_nhe.shape[1] != k_nke.shape[1],
        )
        assert isinstance(y_nhe, Tensor)
        return y_nhe.unsqueeze(0), None

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
