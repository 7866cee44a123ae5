"""Expert parallelism with DeepSpeed's AutoEP: each rank has some of a layer's experts, and all-to-all moves tokens to them."""

from typing import Any

from strata.platform.recipe import MoESection


def config(size: int, moe: MoESection) -> dict[str, Any]:
    """DeepSpeed's `expert_parallel` section, with the module names of Strata's model."""
    return {
        "enabled": True,
        "autoep_size": size,
        "moe_layer_pattern": r"model\.layers\.\d+\.mlp",
        "router_pattern": "gate",
        "expert_pattern": "experts",
        "expert_w1": "gate_proj",
        "expert_w2": "down_proj",
        "expert_w3": "up_proj",
        "top_k": moe.top_k,
        "score_func": "softmax",
        "score_apply": "post",
        "route_norm": True,
        "has_shared_experts": moe.shared_ffn > 0,
        "shared_experts_pattern": "shared_expert",
        "shared_experts_gate_pattern": "shared_expert_gate",
    }
