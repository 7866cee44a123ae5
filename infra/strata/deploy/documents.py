"""Kubernetes objects as dictionaries: YAML reading and writing, and accessors for Ray clusters, pod templates and containers."""

from collections.abc import Iterator
from typing import Any

import yaml

from strata.deploy.names import PART_LABEL
from strata.platform import yaml_text

Document = dict[str, Any]

RAY_KINDS = ("RayCluster", "RayJob", "RayService")


class KubernetesLoader(yaml.CSafeLoader):
    """YAML loader that reads dates and '=' as strings, as Kubernetes does."""


KubernetesLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "value")]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


class StrictLoader(KubernetesLoader):
    """YAML loader that rejects a key which occurs twice in a mapping, as the API server does. YAML's loaders take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key '{key.value}' occurs twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read(text: str) -> list[Document]:
    return [document for document in yaml.load_all(text, Loader=StrictLoader) if document]


def write(documents: list[Document]) -> str:
    return yaml_text.dump_all(documents, width=130)


def title(document: Document) -> str:
    metadata = document.get("metadata")
    name = metadata.get("name", "?") if isinstance(metadata, dict) else "?"
    return f"{document.get('kind', '?')}/{name}"


def part(document: Document) -> str | None:
    label: str | None = (document["metadata"].get("labels") or {}).get(PART_LABEL)
    return label


def cluster_spec(document: Document) -> tuple[str, Document] | None:
    """Path and value of the Ray cluster spec in a Ray object; None for other objects."""
    spec = document.get("spec") or {}
    match document.get("kind"):
        case "RayCluster":
            return "spec", spec
        case "RayJob" if "rayClusterSpec" in spec:
            return "spec.rayClusterSpec", spec["rayClusterSpec"]
        case "RayService" if "rayClusterConfig" in spec:
            return "spec.rayClusterConfig", spec["rayClusterConfig"]
    return None


def worker_groups(document: Document) -> list[Document]:
    found = cluster_spec(document)
    return list(found[1].get("workerGroupSpecs") or []) if found else []


def pod_templates(document: Document) -> Iterator[tuple[str, Document]]:
    """Pod templates of an object, with their paths."""
    spec = document.get("spec") or {}
    found = cluster_spec(document)
    if found:
        path, cluster = found
        if "template" in (cluster.get("headGroupSpec") or {}):
            yield f"{path}.headGroupSpec.template", cluster["headGroupSpec"]["template"]
        for i, group in enumerate(cluster.get("workerGroupSpecs") or []):
            if "template" in group:
                yield f"{path}.workerGroupSpecs[{i}].template", group["template"]
    if "submitterPodTemplate" in spec:
        yield "spec.submitterPodTemplate", spec["submitterPodTemplate"]
    match document.get("kind"):
        case "Deployment" | "StatefulSet" | "DaemonSet" | "Job":
            yield "spec.template", spec["template"]
        case "CronJob":
            yield "spec.jobTemplate.spec.template", spec["jobTemplate"]["spec"]["template"]
        case "Pod":
            yield "", document


def containers(template: Document) -> Iterator[tuple[str, Document]]:
    """Containers and init containers, with their paths in the template."""
    for key in ("initContainers", "containers"):
        for i, container in enumerate((template.get("spec") or {}).get(key) or []):
            yield f"spec.{key}[{i}]", container
