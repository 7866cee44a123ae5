"""Fixed versions of deployments."""

import pytest
from ray import serve

from strata.serving.ray_patches.fixed_version import VERSION, fixed


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
