"""Ulysses sequence parallelism with DeepSpeed: each rank has a slice of every sequence. An all-to-all before and after attention
exchanges slices of the sequence for slices of the heads, so that each head sees the whole sequence."""

from typing import Any

from torch import Tensor, nn

from strata.training.model.llama import Attention, Llama


def initialize(size: int) -> Any:
    """Creates DeepSpeed's process groups. Returns them in the form of the `mpu` argument of `deepspeed.initialize`."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp


def apply(model: Llama, groups: Any) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = Ulysses(module.core, groups.get_sequence_parallel_group())


class Ulysses(nn.Module):
    def __init__(self, core: nn.Module, group: Any) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.distributed = DistributedAttention(core, group, scatter_idx=2, gather_idx=1)

    def forward(self, q_bthe: Tensor, k_btke: Tensor, v_btke: Tensor) -> Tensor:
        y_bthe: Tensor = self.distributed(q_bthe.contiguous(), k_btke.contiguous(), v_btke.contiguous(), 0)
        return y_bthe
