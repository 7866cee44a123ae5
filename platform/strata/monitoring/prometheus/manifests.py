"""Kubernetes objects with the rules and series allowlists of the local Prometheus.

`python -m strata.monitoring.prometheus.manifests` writes them into infra/components. They are committed, and a test checks that
they are up to date.

There are two kinds: objects of the Prometheus operator, which Alibaba Cloud's ARMS also reads, and objects of Google's managed
Prometheus.
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
INTERVAL = "15s"  # scrape and rule evaluation interval
# kube-prometheus-stack reads only objects labelled with its release name. Patch the label if the release has another name.
LABELS = {"app.kubernetes.io/part-of": "strata", "strata.dev/part": "monitoring", "release": "prometheus"}
GOOGLE_LABELS = {name: value for name, value in LABELS.items() if name != "release"}

RAY_POD = {"matchLabels": {"ray.io/is-ray-node": "yes"}}
ENGINE_POD = {"matchLabels": {"ray.io/node-type": "worker"}}  # the monitor selects pods among them that have a port `serve`
GPU_POD = {
    "matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In", "values": ["strata-gpu-exporter", "dcgm-exporter"]}]
}
OPERATOR_POD = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}

RAY_CLUSTER = {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": "cluster"}
NODE = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
DROP_RAY_LABELS = {"action": "labeldrop", "regex": scrape.RAY_DROPPED_LABELS}
ALL_GPU_SERIES = (*scrape.GPU_SERIES, *scrape.DCGM_SERIES)
# Node exporters belong to no Ray cluster. DCGM labels a GPU with the pod that uses it (the scrape renames the label to
# `exported_pod`), and KubeRay names worker pods CLUSTER-GROUP-worker-SUFFIX. Other GPUs get the cluster `nodes`.
NODES_CLUSTER = {"targetLabel": "cluster", "replacement": "nodes"}
CLUSTER_OF_POD = {"sourceLabels": ["exported_pod"], "regex": "(.+)-[^-]+-worker-[^-]+", "targetLabel": "cluster"}
# The operator exports objects of all namespaces.
IN_OUR_NAMESPACE = {"sourceLabels": ["namespace"], "regex": NAMESPACE, "action": "keep"}
CLUSTER_IS_OBJECT = {"sourceLabels": ["name"], "targetLabel": "cluster"}


def pod_monitors() -> list[dict[str, Any]]:
    """PodMonitors. They select pods, head and workers alike, because a RayService creates two Services for its head."""
    return [
        _pod_monitor("strata-ray", RAY_POD, "metrics", [RAY_CLUSTER, NODE], [_keep(scrape.RAY_SERIES), DROP_RAY_LABELS]),
        _pod_monitor(
            "strata-endpoint",
            ENGINE_POD,
            "serve",
            [RAY_CLUSTER],
            [_keep(scrape.ENDPOINT_SERIES)],
            # By default every gateway exports the series of the whole endpoint, and every gateway is scraped.
            params={"scope": ["node"]},
        ),
        _pod_monitor("strata-gpu", GPU_POD, "gpu-metrics", [NODES_CLUSTER], [_keep(ALL_GPU_SERIES), CLUSTER_OF_POD]),
        _pod_monitor(
            "strata-kuberay",
            OPERATOR_POD,
            "http",
            [],
            [_keep(scrape.KUBERAY_SERIES), IN_OUR_NAMESPACE, CLUSTER_IS_OBJECT],
            namespaces={"any": True},  # the operator's namespace is not known
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
    """PodMonitoring objects for Google's managed Prometheus, which reserves the label `cluster` for the GKE cluster. The Ray
    cluster is in `ray_cluster`."""
    ray_cluster = [{"from": "ray.io/cluster", "to": "ray_cluster"}]
    return [
        _pod_monitoring(
            "strata-ray",
            RAY_POD,
            {"metadata": ["pod", "container", "node"], "fromPod": ray_cluster},
            {"port": "metrics", "metricRelabeling": [_keep(scrape.RAY_SERIES), DROP_RAY_LABELS]},
        ),
        _pod_monitoring(
            "strata-endpoint",
            ENGINE_POD,
            {"metadata": ["pod", "container"], "fromPod": ray_cluster},
            {"port": "serve", "params": {"scope": ["node"]}, "metricRelabeling": [_keep(scrape.ENDPOINT_SERIES)]},
        ),
        _pod_monitoring(
            "strata-gpu",
            GPU_POD,
            {"metadata": ["pod", "container"]},  # not `node`: the exporter sets it
            {"port": "gpu-metrics", "metricRelabeling": [_keep(ALL_GPU_SERIES)]},
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
    """ClusterRules: namespaced Rules would not see the GPU series that GKE collects."""
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
