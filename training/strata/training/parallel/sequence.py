"""Ulysses sequence parallelism with DeepSpeed: each rank has a slice of every sequence. An all-to-all before and after attention
exchanges slices of the sequence for slices of the heads, so that each head sees the whole sequence."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from strata.training.diffusion.model import PictureModel
from strata.training.model.attention import Attention
from strata.training.model.llama import Llama


def initialize(size: int) -> Any:
    """Creates DeepSpeed's process groups. Returns them in the form of the `mpu` argument of `deepspeed.initialize`."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp


def apply(model: Llama | PictureModel, groups: Any) -> None:
    if isinstance(model, PictureModel):
        group = groups.get_sequence_parallel_group()
        model.part, model.parts = dist.get_rank(group), dist.get_world_size(group)
        for block in model.transformer.transformer_blocks:
            block.attn.processor.core = JointUlysses(block.attn.processor.core, group)
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = Ulysses(module.core, groups.get_sequence_parallel_group())


class Ulysses(nn.Module):
    def __init__(self, core: nn.Module, group: Any) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.distributed = DistributedAttention(core, group, scatter_idx=2, gather_idx=1)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def forward(
        self, q_bthe: Tensor, k_btke: Tensor, v_btke: Tensor, bounds: Tensor | None = None, sinks_h: Tensor | None = None
    ) -> Tensor:
        """`bounds` are those of whole rows, which this rank's heads see."""
        sinks = None if sinks_h is None else sinks_h.chunk(self._size)[self._rank]
        qkv = (x.contiguous() for x in (q_bthe, k_btke, v_btke))
        y_bthe: Tensor = self.distributed(*qkv, 0, None, bounds, sinks)
        return y_bthe


class JointUlysses(nn.Module):
    """Ulysses for the tokens of a picture and its caption. Attention between all tokens does not depend on their order, so each
    rank's slices of both are one slice of a sequence."""

    def __init__(self, core: nn.Module, group: Any) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.distributed = DistributedAttention(core, group, scatter_idx=2, gather_idx=1)

    def forward(self, q_bthe: Tensor, k_bthe: Tensor, v_bthe: Tensor) -> Tensor:
        y_bthe: Tensor = self.distributed(*(x.contiguous() for x in (q_bthe, k_bthe, v_bthe)), 0)
        return y_bthe
