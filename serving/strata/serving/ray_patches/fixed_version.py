"""Gives a deployment a fixed version.

Ray Serve (2.60) gives every deployment a random version each time its application is deployed, and restarts its replicas.
Gateways must stay when another deployment leaves their application. `Deployment.options` has the argument for Serve's own use.
"""

from ray import serve

VERSION = "1"


def fixed(deployment: serve.Deployment) -> serve.Deployment:
    """The deployment, whose replicas stay as long as its options do."""
    return deployment.options(version=VERSION, _internal=True)
