"""Builds the Ray Serve application of an endpoint: gateways, decode replicas and prefill replicas."""

from collections.abc import Mapping
from typing import Any

from ray.serve import Application

from strata.serving.runtime.deployments import engines, gateways
from strata.serving.runtime.gateway_replica import GatewayReplica
from strata.serving.runtime.replicas import DecodeReplica, PrefillReplica
from strata.serving.spec import EngineSpec, GatewaySpec


def build(
    gateway: GatewaySpec, prefill: EngineSpec, decode: EngineSpec, started_by: Mapping[str, Any] | None = None
) -> Application:
    """`started_by`: entries of the engines' runtime environment that name the process which forks them."""
    pools = [engines(DecodeReplica, decode, started_by or {}).bind(decode)]
    if prefill.pool.replicas:
        pools.append(engines(PrefillReplica, prefill, started_by or {}).bind(prefill))
    # Serve needs one ingress deployment, to which the others are bound.
    return gateways(GatewayReplica, gateway, prefill.pool.most + decode.pool.most).bind(gateway, *pools)
