"""The Serve application: HTTP proxy -> decode replicas -> prefill replicas."""

import importlib

from ray import serve
from ray.serve import Application

from strata.serving.replicas import DecodeReplica, PrefillReplica
from strata.serving.spec import EngineSpec

NAME = "strata"


def build(prefill: EngineSpec, decode: EngineSpec) -> Application:
    # Importing this registers Ray's connectors in the cluster. Replicas that start side by side would each try to, and
    # the second would fail; "register once, in the driver" is how the registry is meant to be used.
    importlib.import_module("ray.llm._internal.serve.engines.vllm.kv_transfer.factory")
    prefill_pool = _deployment(PrefillReplica, prefill).bind(prefill)
    return _deployment(serve.ingress()(DecodeReplica), decode).bind(decode, prefill_pool)


def _deployment(replica: type, spec: EngineSpec) -> serve.Deployment:
    return serve.deployment(
        replica,
        name=spec.role,
        num_replicas=spec.pool.replicas,
        max_ongoing_requests=10 * spec.max_sequences,
        placement_group_bundles=spec.bundles(),
        placement_group_strategy="PACK",
        ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": spec.environment()}},
        # A model that cannot be loaded cannot be loaded twice either: say so at once.
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=5,
    )
