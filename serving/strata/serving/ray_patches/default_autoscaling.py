"""Ray Serve's default autoscaling with the time as an argument, for comparisons in a simulation.

Serve wraps its default policy with scaling factors, delays and bounds, and the wrapper reads the machine's clock. This file calls
the same functions of Ray in the same order with a simulated time.

Written for Ray 2.60. No longer needed when Serve's wrapper takes the time from the context; the test of this file compares both.
"""

import math
from typing import Any

from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext


def decide(
    config: AutoscalingConfig, running: int, target: int, requests: float, now: float, state: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Number of replicas and the state for the next call. `requests`: mean ongoing requests of the look-back period."""
    context: Any = AutoscalingContext(
        deployment_id=None,
        deployment_name="",
        app_name=None,
        current_num_replicas=running,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=requests,
        total_queued_requests=None,
        aggregated_metrics=None,
        raw_metrics=None,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=config,
    )
    wanted, _ = autoscaling_policy.replica_queue_length_autoscaling_policy(context)
    if running == 0 and requests > 0:
        number = int(wanted)
    else:
        scaled = autoscaling_policy._apply_scaling_factors(wanted, running, config)
        if running == 0 and scaled > 0:
            number = scaled
        else:
            number, state = autoscaling_policy._apply_delay_logic(max(0, scaled), target, config, dict(state), _now=now)
    return min(max(math.ceil(number), config.min_replicas), config.max_replicas), state
