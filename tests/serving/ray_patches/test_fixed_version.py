"""Fixed versions of deployments."""

import pytest
from ray import serve
from ray.serve._private.build_app import build_app

from strata.platform import recipe_file
from strata.serving.ray_patches.fixed_version import VERSION, fixed
from strata.serving.runtime.deployments import gateways
from strata.serving.spec import GatewaySpec, Network


class Replica:
    pass


def test_a_deployment_has_the_same_version_in_every_deploy() -> None:
    deployment = serve.deployment(Replica, name="gateway", num_replicas=2)
    assert fixed(deployment).version == fixed(deployment).version == VERSION
    assert fixed(deployment).name == "gateway" and fixed(deployment).num_replicas == 2


def test_the_patch_is_needed() -> None:
    deployment = serve.deployment(Replica, name="gateway")
    assert deployment.version is None  # Serve then draws a random one, and restarts the replicas
    with pytest.raises(ValueError, match="version"):
        deployment.options(version=VERSION)


def test_gateways_have_the_same_options_whoever_deploys_them() -> None:
    """A gateway deploys with the environment of Serve's controller, the starter with none."""
    spec = GatewaySpec.of(recipe_file.load("laptop", []).serve, "main", Network("127.0.0.1", b"s" * 32))
    built = [
        build_app(gateways(Replica, spec, 1).bind(), name="strata", default_runtime_env=environment).deployments[0]
        for environment in ({}, {"env_vars": {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1000000"}})
    ]
    assert built[0].ray_actor_options == built[1].ray_actor_options
    assert built[0].version == built[1].version == VERSION
