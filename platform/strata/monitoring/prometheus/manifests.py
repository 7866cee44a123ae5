"""The same rules and the same lists of kept series as objects for a cluster.

`python -m strata.monitoring.prometheus.manifests` writes them into infra/components; they are committed, and a test holds them
fresh.

Two kinds: those of the Prometheus operator (which Alibaba Cloud's ARMS reads too), and those of Google's managed Prometheus.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from strata.monitoring.prometheus import scrape
from strata.monitoring.prometheus.server import rules_dir
from strata.platform import yaml_text
from strata.platform.files import write_atomic

NAMESPACE = "strata"
INTERVAL = "15s"  # of scrapes, and of the evaluation of rules
# kube-prometheus-stack reads only objects with its release's name on them; patch it where that is another one.
LABELS = {"app.kubernetes.io/part-of": "strata", "strata.dev/part": "monitoring", "release": "prometheus"}
GOOGLE_LABELS = {name: value for name, value in LABELS.items() if name != "release"}

RAY_POD = {"matchLabels": {"ray.io/is-ray-node": "yes"}}
ENGINE_POD = {"matchLabels": {"ray.io/node-type": "worker"}}  # of these, those with a port `serve`
GPU_POD = {
    "matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In", "values": ["strata-gpu-exporter", "dcgm-exporter"]}]
}
OPERATOR_POD = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}

RAY_CLUSTER = {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "cluster"}
NODE = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
DROP_RAY_LABELS = {"action": "labeldrop", "regex": scrape.RAY_DROPPED_LABELS}
KEPT_OF_GPUS = (*scrape.GPU_KEPT, *scrape.DCGM_KEPT)
# Exporters of a whole node belong to no Ray cluster. DCGM says which pod has the GPU (its own label, moved aside by the scrape),
# and KubeRay names worker pods CLUSTER-GROUP-worker-SUFFIX; a GPU that no such pod has is the nodes'.
NODES_CLUSTER = {"targetLabel": "cluster", "replacement": "nodes"}
CLUSTER_OF_POD = {"sourceLabels": ["exported_pod"], "regex": "(.+)-[^-]+-worker-[^-]+", "targetLabel": "cluster"}
IN_OUR_NAMESPACE = {"sourceLabels": ["namespace"], "regex": NAMESPACE, "action": "keep"}  # it knows everybody's objects
CLUSTER_IS_OBJECT = {"sourceLabels": ["name"], "targetLabel": "cluster"}


def pod_monitors() -> list[dict[str, Any]]:
    """One for head and workers alike: pods are selected, not the two Services that a RayService puts before its head."""
    return [
        _pod_monitor("strata-ray", RAY_POD, "metrics", [RAY_CLUSTER, NODE], [_keep(scrape.RAY_KEPT), DROP_RAY_LABELS]),
        _pod_monitor(
            "strata-endpoint",
            ENGINE_POD,
            "serve",
            [RAY_CLUSTER],
            [_keep(scrape.ENDPOINT_KEPT)],
            # Without it every gateway gives out the whole endpoint's series, and all of them are scraped.
            params={"scope": ["node"]},
        ),
        _pod_monitor("strata-gpu", GPU_POD, "gpu-metrics", [NODES_CLUSTER], [_keep(KEPT_OF_GPUS), CLUSTER_OF_POD]),
        _pod_monitor(
            "strata-kuberay",
            OPERATOR_POD,
            "http",
            [],
            [_keep(scrape.KUBERAY_KEPT), IN_OUR_NAMESPACE, CLUSTER_IS_OBJECT],
            namespaces={"any": True},  # wherever the operator was installed
            honorLabels=True,  # `namespace` is the object's, not the operator's
        ),
    ]


def _pod_monitor(
    name: str,
    selector: dict[str, Any],
    port: str,
    relabelings: list[dict[str, Any]],
    metric_relabelings: list[dict[str, Any]],
    namespaces: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    endpoint = {"port": port, "path": "/metrics", "interval": INTERVAL, **more}
    if relabelings:
        endpoint["relabelings"] = relabelings
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": LABELS},
        "spec": {
            "namespaceSelector": namespaces or {"matchNames": [NAMESPACE]},
            "selector": selector,
            "podMetricsEndpoints": [{**endpoint, "metricRelabelings": metric_relabelings}],
        },
    }


def prometheus_rules() -> list[dict[str, Any]]:
    metadata = {"name": "strata", "namespace": NAMESPACE, "labels": LABELS}
    return [
        {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata, "spec": {"groups": _groups()}}
    ]


def pod_monitorings() -> list[dict[str, Any]]:
    """Google's. It keeps the label `cluster` for itself: there it is the GKE cluster's name, and the Ray cluster's is in
    `ray_cluster`."""
    ray_cluster = [{"from": "ray.io/cluster", "to": "ray_cluster"}]
    return [
        _pod_monitoring(
            "strata-ray",
            RAY_POD,
            {"metadata": ["pod", "container", "node"], "fromPod": ray_cluster},
            {"port": "metrics", "metricRelabeling": [_keep(scrape.RAY_KEPT), DROP_RAY_LABELS]},
        ),
        _pod_monitoring(
            "strata-endpoint",
            ENGINE_POD,
            {"metadata": ["pod", "container"], "fromPod": ray_cluster},
            {"port": "serve", "params": {"scope": ["node"]}, "metricRelabeling": [_keep(scrape.ENDPOINT_KEPT)]},
        ),
        _pod_monitoring(
            "strata-gpu",
            GPU_POD,
            {"metadata": ["pod", "container"]},  # not `node`: the exporter's own says it
            {"port": "gpu-metrics", "metricRelabeling": [_keep(KEPT_OF_GPUS)]},
        ),
    ]


def _pod_monitoring(name: str, selector: dict[str, Any], labels: dict[str, Any], endpoint: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.googleapis.com/v1",
        "kind": "PodMonitoring",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": GOOGLE_LABELS},
        "spec": {
            "selector": selector,
            "endpoints": [{"interval": INTERVAL, "path": "/metrics", **endpoint}],
            "targetLabels": labels,
        },
    }


def google_rules() -> list[dict[str, Any]]:
    """Of the cluster, for rules of a namespace would not see the GPU series that GKE itself collects."""
    metadata = {"name": "strata", "labels": GOOGLE_LABELS}
    return [
        {
            "apiVersion": "monitoring.googleapis.com/v1",
            "kind": "ClusterRules",
            "metadata": metadata,
            "spec": {"groups": _groups()},
        }
    ]


def _keep(names: tuple[str, ...]) -> dict[str, Any]:
    return {"sourceLabels": ["__name__"], "regex": scrape.whole(names), "action": "keep"}


def _groups() -> list[dict[str, Any]]:
    groups = [group for file in sorted(rules_dir().glob("*.yaml")) for group in yaml.safe_load(file.read_text())["groups"]]
    return [{"name": group["name"], "interval": INTERVAL, "rules": group["rules"]} for group in groups]


FILES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "monitoring/pod-monitors.yaml": pod_monitors,
    "monitoring/rules.yaml": prometheus_rules,
    "monitoring-gke/pod-monitorings.yaml": pod_monitorings,
    "monitoring-gke/rules.yaml": google_rules,
}


def render(name: str) -> str:
    header = (
        "# Generated by 'python -m strata.monitoring.prometheus.manifests' from infra/prometheus/rules "
        "and strata.monitoring.prometheus.scrape.\n"
    )
    return header + yaml_text.dump_all(FILES[name]())


def write(components: Path) -> None:
    for name in FILES:
        write_atomic(components / name, render(name))


if __name__ == "__main__":
    write(Path(__file__).parents[4] / "infra" / "components")
