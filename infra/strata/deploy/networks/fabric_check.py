"""Runs `strata bench fabric` before training, in the same job on the same Ray cluster.

A separate RayJob would measure other pods, perhaps on other nodes, and would hold the GPUs a second time.
"""

import shlex

from strata.deploy.documents import Document, worker_groups
from strata.deploy.names import RECIPE_IN_POD, STORE
from strata.deploy.networks.pods import merged

# A pod knows its own name; the slow node is to be named.
NODE = {"name": "STRATA_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}


def add(documents: list[Document], run: str, fabric: str | None) -> None:
    """A slow node fails the job before its first step.

    KubeRay's submitter passes the entrypoint through a shell, and Ray quotes its words with double quotes for another one, so it
    must have no double quotes and no dollar signs. Names of runs have none."""
    words = ["strata", "bench", "fabric", "--recipe", RECIPE_IN_POD, "--json", f"{STORE}/fabric/{run}.json"]
    measure = shlex.join([*words, *(["--fabric", fabric] if fabric else [])])
    for document in documents:
        if document["kind"] == "RayJob":
            document["spec"]["entrypoint"] = f"bash -c '{measure} && exec {document['spec']['entrypoint']}'"
            for spec in worker_groups(document):
                name = spec["template"]["spec"]["containers"][0]["name"]
                spec["template"] = merged(spec["template"], {"spec": {"containers": [{"name": name, "env": [NODE]}]}})
