"""Assigns filled objects to nodes, a run, a deployment and a team. The last step of a rendering: quotas count the final pods."""

from collections.abc import Mapping

from strata.deploy.documents import Document, worker_groups
from strata.deploy.layout import Group
from strata.deploy.targets import RESERVATION_LABEL, Target
from strata.deploy.teams.queues import own_queues, set_priority, team_queues
from strata.deploy.teams.scopes import place
from strata.platform.recipe import Recipe

DRAIN_VARIABLE = "STRATA_DRAIN_S"
DRAIN_MARGIN_S = 5  # between the end of a drain and the end of the grace period
SPOT_TAINT = "strata.dev/spot"


def assign(
    documents: list[Document], whole: list[Document], recipe: Recipe, run: str, groups: Mapping[str, Group], target: Target
) -> list[Document]:
    """Changes the objects in place and returns them with their queues. `whole` are the manifests of all parts."""
    for document in documents:
        _select_nodes(document, recipe, target)
    set_priority(documents, recipe.deploy.priority)
    place(documents, recipe.deploy, run)
    if recipe.deploy.quota_gpus is None:
        return own_queues(documents, recipe.deploy, run, groups)
    team_queues(documents, whole, recipe.deploy, target)
    return documents


def _select_nodes(document: Document, recipe: Recipe, target: Target) -> None:
    """Nodes of a component: those of the recipe's reservation, and spot nodes, whose notice depends on the cloud."""
    for group in worker_groups(document):
        pod = group["template"]["spec"]
        if RESERVATION_LABEL in (pod.get("nodeSelector") or {}) and recipe.deploy.reservation:
            pod["nodeSelector"][RESERVATION_LABEL] = recipe.deploy.reservation
        if target.spot_grace_s and any(toleration.get("key") == SPOT_TAINT for toleration in pod.get("tolerations") or []):
            pod["terminationGracePeriodSeconds"] = target.spot_grace_s
            for variable in pod["containers"][0].get("env") or []:
                if variable["name"] == DRAIN_VARIABLE:
                    variable["value"] = str(target.spot_grace_s - DRAIN_MARGIN_S)
