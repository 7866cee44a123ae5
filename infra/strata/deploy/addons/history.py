"""Bucket of KubeRay's history server, in the collectors of Ray clusters and in the server (component `history-server`)."""

from strata.deploy.documents import Document, cluster_spec

SERVER = "strata-history"
BUCKET = "GCS_BUCKET"


def fill(document: Document, storage: str | None) -> None:
    if storage is None:
        return
    if document["kind"] == "Deployment" and document["metadata"]["name"] == SERVER:
        _set(document["spec"]["template"]["spec"]["containers"][0]["env"], storage)
    found = cluster_spec(document)
    if found and (options := found[1].get("historyServerOptions")):
        _set(options["collectorOptions"]["env"], storage)


def _set(variables: list[Document], storage: str) -> None:
    for variable in variables:
        if variable["name"] == BUCKET:
            variable["value"] = storage
