"""Megatron's tensor parallelism, by DeepSpeed's AutoTP: the matrices that read the residual stream are cut by columns, the
ones that write to it by rows, so that a block's workers meet only where it begins and ends. Embeddings, norms, routers and the
output head stay whole on every worker."""

import re
from typing import Any

from torch import nn

COLUMN = r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$"
ROW = r".*\.(o_proj|down_proj)\.weight$"


def split_dimension(name: str) -> int | None:
    """The dimension of a parameter that is cut, None for one that every worker has whole."""
    if re.match(COLUMN, name):
        return 0
    return 1 if re.match(ROW, name) else None


def config(size: int) -> dict[str, Any]:
    """DeepSpeed's `tensor_parallel` section."""
    return {"autotp_size": size, "partition_config": _partition(size)}


def split_stage(stage: nn.Module, group: Any) -> None:
    """A pipeline's stage. DeepSpeed's engine applies AutoTP to whole models only; AutoTP itself takes any module and group."""
    from deepspeed import comm
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.layers import set_autotp_mode

    set_autotp_mode(training=True)  # else what it cuts is frozen, as for inference
    size = comm.get_world_size(group)
    autotp = AutoTP(
        module=stage,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=AutoTPConfig.from_dict(_partition(size) | {"tp_size": size}),
        training_mode=True,
    )
    autotp.mp_size, autotp.mp_group = size, group  # its own setter asks for the group that an engine has made
    autotp.update_linear_policies()
    autotp._replace_module(stage)


def _partition(size: int) -> dict[str, Any]:
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [COLUMN], "partition_type": "column"},
            {"patterns": [ROW], "partition_type": "row"},
            {"patterns": [r".*"], "partition_type": "skip"},
        ],
    }
