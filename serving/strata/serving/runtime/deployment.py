"""Deploys the application, and decides how often Ray Serve may fail to start a replica of it.

At the start the first failure is the answer: a model that cannot be loaded cannot be loaded twice either. Later there is no
number of failures after which to stop, since an endpoint that once worked is not mended by giving up. Serve has one limit for
both, which it counts anew after its controller was restarted, so it gets no limit and the start is watched here.
"""

import time
from typing import Any

from strata.serving.runtime.app import NAME

LOOK_S = 0.2
# For the controller: it gives up after as many failures in a row as the smaller of the deployment's own limit and of this times
# the number of replicas.
CONTROLLER = {"runtime_env": {"env_vars": {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1000000"}}}
FAILED = "failed to start"  # in a deployment's message, from the first failure on


def bring_up(application: Any) -> None:
    """Returns when every replica is up. Raises RuntimeError with Serve's message when one could not start."""
    from ray import serve
    from ray.exceptions import RayActorError

    target = serve.RunTarget(application, NAME, None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    while True:
        try:
            deployed = serve.status().applications.get(NAME)
        except RayActorError:
            deployed = None
        if deployed is None:  # the controller died; Ray restarts it, and it goes on where it was
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
