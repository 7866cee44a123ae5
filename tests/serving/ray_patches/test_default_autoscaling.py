"""Ray Serve's default autoscaling with a simulated time, against Serve's own wrapper with a simulated clock."""

import random
import time
from typing import Any

import pytest
from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from strata.serving.ray_patches import default_autoscaling


def serves_own(config: AutoscalingConfig, running: int, target: int, requests: float, state: dict[str, Any]) -> Any:
    context: Any = AutoscalingContext(
        deployment_id=None, deployment_name="", app_name=None, current_num_replicas=running, target_num_replicas=target,
        running_replicas=[], total_num_requests=requests, total_queued_requests=None, aggregated_metrics=None, raw_metrics=None,
        capacity_adjusted_min_replicas=0, capacity_adjusted_max_replicas=0, policy_state=state, last_scale_up_time=None,
        last_scale_down_time=None, current_time=None, config=config,
    )  # fmt: skip
    return autoscaling_policy._apply_autoscaling_config(config.policy.get_policy())(context)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("least", [0, 1])
def test_decisions_are_those_of_serve(seed: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, now = random.Random(seed), 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    config = AutoscalingConfig(min_replicas=least, max_replicas=30)
    target, running = 1, 1
    ours: dict[str, Any] = {}
    serves: dict[str, Any] = {}
    requests, changes = 2.0, set()
    for _ in range(3000):
        now += 2.0
        if draw.random() < 0.02:
            requests = draw.choice([0.0, 0.0, 1.0, 5.0, 40.0, 200.0])
        found, ours = default_autoscaling.decide(config, running, target, requests, now, ours)
        number, serves = serves_own(config, running, target, requests, serves)
        assert found == min(max(number, least), 30)
        changes.add((target, found))
        running, target = target, found
    assert len(changes) > 7 and any(new < old for old, new in changes)


def test_defaults_are_those_that_the_comparison_states() -> None:
    config = AutoscalingConfig(min_replicas=1, max_replicas=4)
    assert (config.target_ongoing_requests, config.look_back_period_s) == (2, 30.0)
    assert (config.upscale_delay_s, config.downscale_delay_s, config.downscale_to_zero_delay_s) == (30.0, 600.0, None)
