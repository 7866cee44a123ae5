"""What the manifests of `infra/` name things, for the code that looks for them there."""

from pathlib import PurePosixPath

PARTS = ("train", "serve", "lab")
PART_LABEL = "strata.dev/part"
# A Ray object is named deploy.name and this.
NAME_ENDS = {"RayJob": "-train", "RayService": "", "RayCluster": "-lab"}
# Worker groups of each, and which group of the layout they are.
GROUPS = {
    "RayJob": {"workers": "train"},
    "RayService": {"prefill": "prefill", "decode": "decode"},
    "RayCluster": {"workers": "lab"},
}
# What a pod of an engine group offers to Ray beside CPUs and GPUs: room for its gateways, and, as strata-<group>, for so many
# engines of its kind. Without the second a decode engine could end up on the prefill group's type of GPU.
GATEWAY_RESOURCE = "strata-gateway"
ENGINE_RESOURCE = "strata-{group}"
STORE = PurePosixPath("/mnt/strata")  # where the shared storage is mounted
RECIPE_MAP = "strata-recipe"
RECIPE_IN_POD = "/etc/strata/recipe.yaml"
PORT = 8000  # the container port `serve`, in probes and network policies too
TRAIN_BUDGET = "strata-train"
IMAGE = "strata"
