"""Models that pods serve or train from: a run or a folder on the shared storage, a bucket's URI, or an id on Hugging Face.

A model that is not on the shared storage is copied to a volume of each pod by an init container, before Ray starts. The volume is
a generic ephemeral one: its size is bounded, it is deleted with its pod, and unlike a folder of the node it needs no privileges.
With the component `model-pull`, a job copies the model to the shared storage once, and pods wait for it and use that copy.
"""

import hashlib
from collections.abc import Collection
from typing import Any

from strata.deploy.documents import Document, cluster_spec, pod_templates
from strata.deploy.names import STORE
from strata.platform.errors import UserError
from strata.platform.model_families import bucket, source
from strata.platform.recipe import Recipe

LOCAL_SCHEMES = ("file", "local", "memory")
FOLDER = "/var/cache/strata/models"
PULL_JOB = "strata-model-pull"
# Both are optional: public models need no token, and pods usually have the identity of their service account.
TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "strata-hf", "key": "token", "optional": True}}}
BUCKET_KEYS = {"secretRef": {"name": "strata-bucket", "optional": True}}
STORAGE_CLASSES = {"ack": "alicloud-disk-topology-alltype"}  # the others have a default class


def served(recipe: Recipe, run: str) -> str:
    """Model of the endpoint, as its pods resolve it."""
    given = recipe.deploy.model or run
    return given if is_remote(given) or _on_store(given) else f"{STORE}/runs/{given}/export"


def is_remote(given: str) -> bool:
    """True if pods must copy a model: a folder of this machine does not decide it."""
    return bucket.is_uri(given) or bool(source.ID.fullmatch(given))


def refuse(recipe: Recipe, parts: Collection[str]) -> None:
    given = recipe.deploy.model
    if "serve" in parts and given is not None and not (_reachable(given) or source.RUN.fullmatch(given)):
        raise UserError(f"deploy.model={given} is not visible to pods.", _fix("deploy.model"))
    speculative = recipe.serve.speculative
    draft = speculative.draft if speculative is not None else None
    if "serve" in parts and draft is not None and not (_on_store(draft) or source.RUN.fullmatch(draft)):
        cause = f"serve.speculative.draft={draft} is not visible to pods, which copy the served model only."
        raise UserError(cause, f"Set it to a run's name, or to a folder under {STORE}.")
    for key, trained in (("model.from", recipe.model.source), ("train.distill", recipe.train.distill)):
        if "train" in parts and trained is not None and not _reachable(trained):
            raise UserError(f"{key}={trained} is on this machine and not visible to pods.", _fix(key))


def _fix(key: str) -> str:
    return f"Set {key} to a folder under {STORE}, a bucket's URI (gs://, s3://, oss://) or an id on Hugging Face."


def _reachable(given: str) -> bool:
    if bucket.is_uri(given):
        return given.partition("://")[0] not in LOCAL_SCHEMES
    return is_remote(given) or _on_store(given)


def _on_store(given: str) -> bool:
    return given == str(STORE) or given.startswith(f"{STORE}/")


def are_pulled(documents: list[Document]) -> bool:
    return any(document["kind"] == "Job" and document["metadata"]["name"] == PULL_JOB for document in documents)


def add(document: Document, recipe: Recipe, run: str, target: str, pulled: bool) -> None:
    """Adds the copy of its model to the pods of a RayJob or RayService, or the wait for the job's copy (`pulled`)."""
    given = {"RayJob": recipe.model.source, "RayService": served(recipe, run)}.get(document["kind"])
    found = cluster_spec(document)
    if found is None or given is None or not is_remote(given):
        return
    head = f"{found[0]}.headGroupSpec"
    for path, template in pod_templates(document):
        if not path.startswith(found[0]):
            continue  # the pod that submits the job
        if pulled:
            _wait(template["spec"], given)
            continue
        container = template["spec"]["containers"][0]
        container.setdefault("env", []).extend([{"name": "STRATA_MODELS", "value": FOLDER}, TOKEN])
        container.setdefault("envFrom", []).append(BUCKET_KEYS)
        if path.startswith(head) and document["kind"] == "RayService":
            continue  # no engine runs there; the application reads config.json only
        _copy(template["spec"], given, _volume(recipe.deploy.model_cache_gib, STORAGE_CLASSES.get(target)))


def _copy(pod: Document, given: str, volume: Document) -> None:
    container = pod["containers"][0]
    mount = {"name": "models", "mountPath": FOLDER}
    pod.setdefault("volumes", []).append(volume)
    container["volumeMounts"] = [*container["volumeMounts"], mount]
    init = _init_container(pod, ["strata", "model", "pull", given])
    init["env"] += [{"name": "STRATA_MODELS", "value": FOLDER}, TOKEN]
    init["envFrom"] = [BUCKET_KEYS]
    init["resources"] = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}}
    init["volumeMounts"].append(mount)


def _wait(pod: Document, given: str) -> None:
    """Heads wait too: the application is built there, from the files of the copy."""
    init = _init_container(pod, ["strata", "model", "pull", "--wait", given])
    init["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}


def _init_container(pod: Document, command: list[str]) -> Document:
    container = pod["containers"][0]
    store = next(one for one in container["volumeMounts"] if one["mountPath"] == str(STORE))
    init = {
        "name": "model",
        "image": container["image"],
        "command": command,
        "securityContext": container["securityContext"],
        "env": [{"name": "STRATA_HOME", "value": str(STORE)}],
        "volumeMounts": [{**store, "readOnly": True}],
    }
    pod.setdefault("initContainers", []).append(init)
    return init


def _volume(gib: int, storage_class: str | None) -> Document:
    claim: Document = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{gib}Gi"}}}
    if storage_class:
        claim["storageClassName"] = storage_class
    return {"name": "models", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}


def fill_pull_job(job: Document, documents: list[Document], recipe: Recipe, run: str) -> None:
    """Sets the models that the job copies, and its storage. A job cannot be changed, so its name has their digest."""
    kinds = {document["kind"] for document in documents}
    wanted = [recipe.model.source if "RayJob" in kinds else None, served(recipe, run) if "RayService" in kinds else None]
    models = sorted({given for given in wanted if given is not None and is_remote(given)})
    if not models:
        fix = "Remove it, or set deploy.model or model.from to a bucket's URI or an id on Hugging Face."
        raise UserError("The component model-pull has nothing to copy: the models are on the shared storage.", fix)
    job["metadata"]["name"] = f"{recipe.deploy.name}-model-pull-{hashlib.sha256(' '.join(models).encode()).hexdigest()[:8]}"
    pod = job["spec"]["template"]
    pod["spec"]["containers"][0]["args"] = models
    _mount_like(pod, documents)


def _mount_like(pod: Document, documents: list[Document]) -> None:
    """Copies what a Ray head has to mount a bucket: the annotations of GKE's sidecar, and the label of nodes with identities."""
    heads: list[Any] = [found[1]["headGroupSpec"]["template"] for document in documents if (found := cluster_spec(document))]
    if heads:
        annotations = heads[0].get("metadata", {}).get("annotations") or {}
        mounting = {key: value for key, value in annotations.items() if key.startswith("gke-gcsfuse/")}
        if mounting:
            pod["metadata"].setdefault("annotations", {}).update(mounting)
        pod["spec"]["nodeSelector"] = dict(heads[0]["spec"].get("nodeSelector") or {})
