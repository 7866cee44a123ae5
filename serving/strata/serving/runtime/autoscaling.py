"""Autoscaling policy of Ray Serve, from the load that replicas report.

Requests do not pass through Serve, so its own request count is zero. Each replica reports its load
(`record_autoscaling_stats`), 1.0 at capacity, and Serve calls this policy. Serve applies the delays and the bounds.
"""

import math
from typing import Any

# Target load of a replica. The rest is headroom for requests that arrive while another replica starts.
FULL = 0.8
# Concurrent prompts at which a prefill engine is at capacity: it processes them one after the other.
PREFILLS = 2
UPSCALE_DELAY_S = 10.0
DOWNSCALE_DELAY_S = 300.0
GATEWAY_DELAY_S = 1.0  # a node without a gateway gets no traffic


def replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Policy for engines. `context` is Serve's AutoscalingContext."""
    loads = (context.aggregated_metrics or {}).get("load", {})
    wanted = math.ceil(sum(loads.values()) / FULL) if loads else context.target_num_replicas
    return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}


def gateways(context: Any) -> tuple[int, dict[str, Any]]:
    """Policy for gateways: the number that the gateways report, from the nodes with engines."""
    wanted = (context.aggregated_metrics or {}).get("wanted", {})
    number = int(max(wanted.values())) if wanted else context.target_num_replicas
    return min(max(number, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}


def config(least: int, most: int) -> dict[str, Any]:
    return _config(least, most, "replicas", UPSCALE_DELAY_S)


def slo_config(**arguments: Any) -> dict[str, Any]:
    """Settings for the policy by SLO, which has cool-downs of its own. A pool that may be empty starts with one replica, so that
    a start still shows whether the model can be served."""
    bounds = arguments["bounds"]
    return {
        "min_replicas": bounds["least"],
        "initial_replicas": max(1, bounds["least"]),
        "max_replicas": bounds["most"],
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        "policy": {"policy_function": "strata.serving.scaling.serve_policy:SloPolicy", "policy_kwargs": arguments},
    }


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
