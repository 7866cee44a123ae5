"""How many replicas a pool should have, by what its replicas say of their load.

Requests do not pass through Serve, so its own count of them is zero: each replica reports a load (`record_autoscaling_stats`),
1.0 when it is full, and this is the policy that Serve asks. Delays before it acts, and bounds, are Serve's.
"""

import math
from typing import Any

# Replicas are sized to be so full: the rest is for what comes while another one starts.
FULL = 0.8
# Prompts at once that fill a prefill engine: it works on one after the other, and the second one waits.
PREFILLS = 2
UPSCALE_DELAY_S = 10.0
DOWNSCALE_DELAY_S = 300.0
GATEWAY_DELAY_S = 1.0  # until it has one, a node gets no traffic


def replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """`context` is Serve's AutoscalingContext."""
    loads = (context.aggregated_metrics or {}).get("load", {})
    wanted = math.ceil(sum(loads.values()) / FULL) if loads else context.target_num_replicas
    return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}


def gateways(context: Any) -> tuple[int, dict[str, Any]]:
    """As many as the gateways themselves say, who see the engines come and go."""
    wanted = (context.aggregated_metrics or {}).get("wanted", {})
    number = int(max(wanted.values())) if wanted else context.target_num_replicas
    return min(max(number, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}


def config(least: int, most: int) -> dict[str, Any]:
    return _config(least, most, "replicas", UPSCALE_DELAY_S)


def gateway_config(most: int) -> dict[str, Any]:
    return _config(1, most, "gateways", GATEWAY_DELAY_S)


def _config(least: int, most: int, policy: str, upscale_delay_s: float) -> dict[str, Any]:
    return {
        "min_replicas": least,
        "initial_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": upscale_delay_s,
        "downscale_delay_s": DOWNSCALE_DELAY_S,
        "policy": {"policy_function": f"strata.serving.runtime.autoscaling:{policy}"},
    }
