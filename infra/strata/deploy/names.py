"""Names used in the manifests of `infra/`: objects, labels, worker groups, Ray resources and paths."""

from pathlib import PurePosixPath

PARTS = ("train", "serve", "lab")
PART_LABEL = "strata.dev/part"
DEPLOYMENT_LABEL = "strata.dev/deployment"  # deploy.name, on the pods of a Ray cluster
RUN_LABEL = "strata.dev/run"  # the run, on the pods of its job
# Name of the namespace, and first word of all objects' names, in the manifests. `teams.scopes` replaces it.
BASE = "strata"
# Worker groups of each Ray object, and their names in `layout.plan`.
GROUPS = {
    "RayJob": {"workers": "train"},
    "RayService": {"prefill": "prefill", "decode": "decode"},
    "RayCluster": {"workers": "lab"},
}
# Custom Ray resources of a pod of an engine group: capacity for gateways, and, as strata-<group>, for engines of its pool.
# Without the second, Ray could place a decode engine on the prefill group's GPUs.
GATEWAY_RESOURCE = "strata-gateway"
ENGINE_RESOURCE = "strata-{group}"
GPU_RESOURCE = "nvidia.com/gpu"
STORE = PurePosixPath("/mnt/strata")  # mount point of the shared storage
RECIPE_MAP = "strata-recipe"
RECIPE_IN_POD = "/etc/strata/recipe.yaml"
PORT = 8000  # the container port `serve`, also in probes and network policies
TRAIN_JOB = "strata-train"
TRAIN_BUDGET = "strata-train"
IMAGE = "strata"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
