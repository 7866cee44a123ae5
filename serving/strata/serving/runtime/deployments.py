"""Ray Serve deployments of engines and gateways, and the names of the applications that they are in."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from strata.serving.gateway.keys import FILE
from strata.serving.metrics import request_log, tracing
from strata.serving.ray_patches.fixed_version import fixed
from strata.serving.runtime import autoscaling
from strata.serving.runtime.replicas import DecodeReplica, PrefillReplica
from strata.serving.spec import EngineSpec, GatewaySpec

NAME = "strata"
DRAIN_S = 30.0
START_FAILURES = 1_000_000  # no limit, for the reason in `start/deploy.py`
GATEWAY_RESOURCE = "strata-gateway"


def build_model(prefill: EngineSpec, decode: EngineSpec, started_by: Mapping[str, Any] | None = None) -> Application:
    """Application with the engines of one model, for an endpoint that runs."""
    first = [engines(PrefillReplica, prefill, started_by or {}).bind(prefill)] if prefill.pool.replicas else []
    return engines(DecodeReplica, decode, started_by or {}).bind(decode, *first)


def name_of(model: str, revision: str) -> str:
    """Application with a model's engines."""
    return f"{NAME}.{model}.{revision}" if revision else NAME


def is_ours(application: str) -> bool:
    return application == NAME or application.startswith(f"{NAME}.")


def engines(replica: type, spec: EngineSpec, started_by: Mapping[str, Any]) -> serve.Deployment:
    environment = {**started_by, "env_vars": tracing.variables() | spec.environment() | started_by.get("env_vars", {})}
    scaling = spec.scaling()
    return serve.deployment(
        replica,
        name=spec.role,
        num_replicas="auto" if scaling else spec.pool.replicas,
        autoscaling_config=scaling,
        ray_actor_options=spec.resources() | {"runtime_env": environment},
        max_constructor_retry_count=START_FAILURES,
        health_check_period_s=1,
        graceful_shutdown_timeout_s=DRAIN_S,
        **request_log.options(),
    )


def gateways(replica: type, spec: GatewaySpec, most_nodes: int) -> serve.Deployment:
    """`replica`: the class of the gateways, which themselves deploy further models and so cannot be imported here."""
    resources = {"resources": {GATEWAY_RESOURCE: 1 / spec.gateways}} if spec.on_every_node else {}
    # Workers of an existing cluster have the environment of its start, without the file of API keys.
    variables = tracing.variables() | ({FILE: spec.keys_file} if spec.keys_file else {})
    # Always stated: Serve would add the environment of the process that deploys. A gateway's differs from the starter's, and with
    # other options Serve restarts the gateways when the first engines leave their application.
    environment = {"runtime_env": {"env_vars": variables}}
    deployment = serve.deployment(
        replica,
        name="gateway",
        num_replicas="auto" if spec.on_every_node else spec.gateways,
        autoscaling_config=autoscaling.gateway_config(spec.gateways * most_nodes) if spec.on_every_node else None,
        ray_actor_options={"num_cpus": 0} | resources | environment,
        health_check_period_s=1,
        graceful_shutdown_timeout_s=DRAIN_S,
        **request_log.options(),
    )
    return fixed(deployment)
