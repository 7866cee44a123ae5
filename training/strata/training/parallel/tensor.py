"""Megatron's tensor parallelism with DeepSpeed's AutoTP. Matrices that read the residual stream are split by columns, matrices
that write to it by rows, so a block communicates only at its beginning and end. Embeddings, norms, routers and the output head
are replicated. An adapter (LoRA) is split as its projection is: B by columns or A by rows, and DoRA's magnitudes with B. In a
picture model, the transformer's blocks are split, for pictures and captions alike; modulations and the text encoder are
replicated."""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strata.training.diffusion.attention import head_norms
from strata.training.diffusion.model import PictureModel
from strata.training.model.attention import Attention
from strata.training.model.dora import DoraLinear

COLUMN = r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.((base|lora_B)\.)?weight$"
ROW = r".*\.(o_proj|down_proj)\.((base|lora_A)\.)?weight$"
# vectors with one part per column
BY_HEADS = r".*\.((q_proj|k_proj|v_proj|gate_proj|up_proj)\.((base\.)?bias|lora_magnitude_vector)|sinks)$"

PICTURE_COLUMN = r".*\.(to_[qkv]|add_[qkv]_proj|ff(_context)?\.net\.0\.proj)\.weight$"
PICTURE_ROW = r".*\.(to_out\.0|to_add_out|ff(_context)?\.net\.2)\.weight$"
PICTURE_BY_HEADS = PICTURE_COLUMN.replace("weight", "bias")
PICTURE_PREFIXES = ("transformer.", "text_encoder.")  # of a picture model's parameters, and of no other model's


def split_dimension(name: str) -> int | None:
    """Dimension along which a parameter is split, None for a replicated parameter."""
    picture = name.startswith(PICTURE_PREFIXES)
    column, by_heads, row = (PICTURE_COLUMN, PICTURE_BY_HEADS, PICTURE_ROW) if picture else (COLUMN, BY_HEADS, ROW)
    if re.match(column, name) or re.match(by_heads, name):
        return 0
    return 1 if re.match(row, name) else None


def finish(module: nn.Module, group: Any) -> None:
    """Splits what AutoTP leaves whole: sinks, DoRA's magnitudes, and the gradients of norms of queries and keys, which each rank
    computes from its own heads."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        return total

    def part(whole: nn.Parameter) -> nn.Parameter:
        local = nn.Parameter(torch.chunk(whole.detach(), size)[rank].clone(), requires_grad=whole.requires_grad)
        local.tensor_model_parallel = True  # type: ignore[attr-defined]
        return local

    for name, projection in module.named_modules():
        if isinstance(projection, DoraLinear) and split_dimension(f"{name}.lora_magnitude_vector") == 0:
            projection.lora_magnitude_vector = part(projection.lora_magnitude_vector)
    norms: list[Any] = []
    for attention in module.modules():
        if isinstance(attention, PictureModel):
            blocks: Any = attention.transformer.transformer_blocks
            norms += [norm for block in blocks for norm in head_norms(block.attn)]
        if not isinstance(attention, Attention):
            continue
        if attention.sinks is not None:
            attention.sinks = part(attention.sinks)
        norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None and norm.weight.requires_grad]
    for norm in norms:
        norm.weight.register_hook(summed)


def config(size: int, picture: bool = False) -> dict[str, Any]:
    """DeepSpeed's `tensor_parallel` section."""
    columns, rows = (PICTURE_COLUMN, PICTURE_ROW) if picture else (COLUMN, ROW)
    return {"autotp_size": size, "partition_config": _partition(columns, rows)}


def split_stage(stage: nn.Module, group: Any) -> None:
    """Applies AutoTP to a pipeline stage. DeepSpeed's engine supports AutoTP for whole models only, but AutoTP itself accepts
    any module and group."""
    from deepspeed import comm
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.layers import set_autotp_mode

    set_autotp_mode(training=True)  # otherwise the split layers are frozen, as for inference
    size = comm.get_world_size(group)
    autotp = AutoTP(
        module=stage,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=AutoTPConfig.from_dict(_partition(COLUMN, ROW) | {"tp_size": size}),
        training_mode=True,
    )
    autotp.mp_size, autotp.mp_group = size, group  # its setter requires a group created by an engine
    autotp.update_linear_policies()
    autotp._replace_module(stage)


def _partition(columns: str, rows: str) -> dict[str, Any]:
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [columns], "partition_type": "column"},
            {"patterns": [rows], "partition_type": "row"},
            {"patterns": [r".*"], "partition_type": "skip"},
        ],
    }
