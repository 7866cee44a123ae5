"""Names used in the manifests of `infra/`: objects, labels, worker groups, Ray resources and paths."""

from pathlib import PurePosixPath

PARTS = ("train", "serve", "lab")
PART_LABEL = "strata.dev/part"
# Suffix after deploy.name in the name of a Ray object.
NAME_ENDS = {"RayJob": "-train", "RayService": "", "RayCluster": "-lab"}
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
STORE = PurePosixPath("/mnt/strata")  # mount point of the shared storage
RECIPE_MAP = "strata-recipe"
RECIPE_IN_POD = "/etc/strata/recipe.yaml"
PORT = 8000  # the container port `serve`, also in probes and network policies
TRAIN_BUDGET = "strata-train"
IMAGE = "strata"
