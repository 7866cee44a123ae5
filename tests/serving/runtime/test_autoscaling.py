"""Autoscaling policies: number of replicas by load."""

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig

from strata.serving.runtime import autoscaling


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [([0.0], 1), ([0.5], 1), ([0.9], 2), ([1.5, 1.5], 4), ([3.0, 3.0, 3.0], 4), ([0.1, 0.1, 0.1], 1), ([], 3)],
)
def test_replicas_follow_the_load_within_bounds(loads: list[float], wanted: int) -> None:
    context = SimpleNamespace(
        aggregated_metrics={"load": dict(enumerate(loads))},
        target_num_replicas=3,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert autoscaling.replicas(context)[0] == wanted


def test_serve_accepts_the_policy() -> None:
    policy = AutoscalingConfig(**autoscaling.config(1, 4)).policy.get_policy()
    assert policy.__name__ == "replicas" and policy.__module__ == "strata.serving.runtime.autoscaling"


@pytest.mark.parametrize(("reported", "wanted"), [([3.0, 2.0], 3), ([9.0], 4), ([0.0], 1), ([], 3)])
def test_number_of_gateways_is_the_reported_one(reported: list[float], wanted: int) -> None:
    context = SimpleNamespace(
        aggregated_metrics={"wanted": dict(enumerate(reported))} if reported else None,
        target_num_replicas=3,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert autoscaling.gateways(context)[0] == wanted
    assert AutoscalingConfig(**autoscaling.gateway_config(4)).policy.get_policy().__name__ == "gateways"
