"""Deploys the application, and limits the failures to start a replica.

During the first start, one failure ends it: a retry would fail to load the model again. Later, retries are unlimited, because
giving up does not fix an endpoint that once worked. Serve has a single limit for both, and resets its count when the
controller restarts. So Serve has no limit here, and this module watches the first start.
"""

import time
from typing import Any

from strata.serving.runtime.deployments import NAME

LOOK_S = 0.2
# The controller gives up after consecutive failures: the smaller of the deployment's limit and this value times the number of
# replicas.
CONTROLLER = {"runtime_env": {"env_vars": {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1000000"}}}
FAILED = "failed to start"  # in a deployment's message after the first failure


def bring_up(application: Any) -> None:
    """Returns when every replica is up. Raises RuntimeError with Serve's message if a replica fails to start."""
    from ray import serve
    from ray.exceptions import RayActorError

    target = serve.RunTarget(application, NAME, None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    while True:
        try:
            deployed = serve.status().applications.get(NAME)
        except RayActorError:
            deployed = None
        if deployed is None:  # the controller died; Ray restarts it, and it recovers its state
            time.sleep(LOOK_S)
            continue
        if deployed.status == "RUNNING":
            return
        for deployment in deployed.deployments.values():
            if FAILED in deployment.message:
                raise RuntimeError(deployment.message)
        if deployed.status in ("DEPLOY_FAILED", "DELETING"):
            raise RuntimeError(deployed.message)
        time.sleep(LOOK_S)
