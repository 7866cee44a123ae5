"""Autoscaling policies: number of replicas by load."""

from types import SimpleNamespace
from typing import Any

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


def context(loads: dict[str, float] | None, target: int = 3, least: int = 1, most: int = 9) -> SimpleNamespace:
    found = None if loads is None else {"load": loads, "wanted": loads}
    return SimpleNamespace(
        aggregated_metrics=found,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
    )


@pytest.mark.parametrize(
    ("loads", "number"),
    [
        ({"a": 0.8}, 1),
        ({"a": 0.81}, 2),
        ({"a": 0.9, "b": 0.7}, 2),  # 1.6 / 0.8
        ({"a": 0.9, "b": 0.75}, 3),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, 5),  # full: a fifth more
        ({"a": 0.0}, 1),
        ({"a": 99.0}, 9),
        ({}, 3),
        (None, 3),
    ],
)
def test_replicas_run_at_four_fifths_of_their_capacity(loads: dict[str, float] | None, number: int) -> None:
    assert autoscaling.replicas(context(loads)) == (number, {})


@pytest.mark.parametrize("policy", [autoscaling.replicas, autoscaling.gateways])
def test_the_bounds_hold_without_reports(policy: Any) -> None:
    assert policy(context(None, target=1, least=2))[0] == 2
    assert policy(context({}, target=12))[0] == 9


@pytest.mark.parametrize(
    ("config", "least", "most", "upscale_delay_s", "policy"),
    [
        (autoscaling.config(2, 5), 2, 5, 10.0, "replicas"),
        (autoscaling.gateway_config(5), 1, 5, 1.0, "gateways"),
    ],
)
def test_settings_for_serve(config: dict[str, Any], least: int, most: int, upscale_delay_s: float, policy: str) -> None:
    assert config == {
        "min_replicas": least,
        "initial_replicas": least,
        "max_replicas": most,
        "upscale_delay_s": upscale_delay_s,
        "downscale_delay_s": 300.0,
        "policy": {"policy_function": f"strata.serving.runtime.autoscaling:{policy}"},
    }


def test_a_prefill_engine_is_full_with_two_prompts() -> None:
    assert autoscaling.PREFILLS == 2
