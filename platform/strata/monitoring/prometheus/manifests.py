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

from strata.monitoring.prometheus import runbooks, scrape
from strata.monitoring.prometheus.server import rules_dir
from strata.platform import yaml_text
from strata.platform.files import write_atomic

NAMESPACE = "strata"  # of a team's Ray clusters; each team has its monitors
SHARED_NAMESPACE = "strata-monitoring"  # of what all teams share: exporters, rules, and monitors of the cluster's programs
INTERVAL = "15s"  # scrape interval, and evaluation interval of most groups
# Groups with rules for every GPU of the cluster. At 16,384 GPUs one evaluation takes longer than a scrape interval.
FLEET_GROUPS, FLEET_INTERVAL = ("strata-gpu", "strata-fleet", "strata-teams"), "60s"
# kube-prometheus-stack reads only objects labelled with its release name. Patch the label if the release has another name.
LABELS = {"app.kubernetes.io/part-of": "strata", "strata.dev/part": "monitoring", "release": "prometheus"}
GOOGLE_LABELS = {name: value for name, value in LABELS.items() if name != "release"}

RAY_POD = {"matchLabels": {"ray.io/is-ray-node": "yes"}}
ENGINE_POD = {"matchLabels": {"ray.io/node-type": "worker"}}  # the monitor selects pods among them that have a port `serve`
GPU_POD = {
    "matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In", "values": ["strata-gpu-exporter", "dcgm-exporter"]}]
}
OPERATOR_POD = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}  # the label of KubeRay's Helm chart
KUBE_STATE_POD = {"matchLabels": {"app.kubernetes.io/name": "kube-state-metrics"}}  # the label of its Helm chart
KUBE_STATE_PORT = 8080

# The Ray cluster is in `ray_io_cluster` everywhere. `cluster` is the same on the Prometheus operator; Google's managed Prometheus
# reserves it for the name of the GKE cluster.
RAY_CLUSTER = [
    {"sourceLabels": ["__meta_kubernetes_pod_label_ray_io_cluster"], "targetLabel": label}
    for label in ("cluster", "ray_io_cluster")
]
NODE = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
DROP_RAY_LABELS = {"action": "labeldrop", "regex": scrape.RAY_DROPPED_LABELS}
ALL_GPU_SERIES = (*scrape.GPU_SERIES, *scrape.DCGM_SERIES)
# Node exporters belong to no Ray cluster; rules find that of each GPU.
NODES_CLUSTER = {"targetLabel": "cluster", "replacement": "nodes"}
# The operator names the object in `name`: a RayCluster in some series, a RayJob or a RayService in others.
CLUSTER_IS_OBJECT = {"sourceLabels": ["name"], "targetLabel": "cluster"}
RAY_CLUSTER_IS_OBJECT = {
    "sourceLabels": ["__name__", "name"],
    "regex": "kuberay_cluster_.*;(.+)",
    "targetLabel": "ray_io_cluster",
}


def pod_monitors() -> list[dict[str, Any]]:
    """PodMonitors. They select pods, head and workers alike, because a RayService creates two Services for its head."""
    return [
        _pod_monitor(
            "strata-ray", NAMESPACE, RAY_POD, "metrics", [*RAY_CLUSTER, NODE], [_keep(scrape.RAY_SERIES), DROP_RAY_LABELS]
        ),
        _pod_monitor(
            "strata-endpoint",
            NAMESPACE,
            ENGINE_POD,
            "serve",
            RAY_CLUSTER,
            [_keep(scrape.ENDPOINT_SERIES)],
            # By default every gateway exports the series of the whole endpoint, and every gateway is scraped.
            params={"scope": ["node"]},
        ),
        _pod_monitor("strata-gpu", SHARED_NAMESPACE, GPU_POD, "gpu-metrics", [NODES_CLUSTER], [_keep(ALL_GPU_SERIES)]),
        _pod_monitor(
            "strata-kuberay",
            SHARED_NAMESPACE,
            OPERATOR_POD,
            "http",
            [],
            [_keep(scrape.KUBERAY_SERIES), CLUSTER_IS_OBJECT, RAY_CLUSTER_IS_OBJECT],
            namespaces={"any": True},  # the operator's namespace is not known
            honorLabels=True,  # `namespace` is the object's, not the operator's
        ),
    ]


def _pod_monitor(
    name: str,
    namespace: str,
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
        "metadata": {"name": name, "namespace": namespace, "labels": LABELS},
        "spec": {
            **({"namespaceSelector": namespaces} if namespaces else {}),  # by default the monitor's own
            "selector": selector,
            "podMetricsEndpoints": [{**endpoint, "metricRelabelings": metric_relabelings}],
        },
    }


def prometheus_rules() -> list[dict[str, Any]]:
    metadata = {"name": "strata", "namespace": SHARED_NAMESPACE, "labels": LABELS}
    return [
        {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata, "spec": {"groups": groups()}}
    ]


def pod_monitorings() -> list[dict[str, Any]]:
    """Monitors for Google's managed Prometheus. A PodMonitoring selects pods of its namespace, a ClusterPodMonitoring of all."""
    ray_cluster = [{"from": "ray.io/cluster", "to": "ray_io_cluster"}]
    # No target labels: they would rename the exporter's own `namespace`, `pod` and `container`, which are the object's.
    respected: dict[str, Any] = {"metadata": []}
    return [
        _pod_monitoring(
            "strata-ray",
            NAMESPACE,
            RAY_POD,
            {"metadata": ["pod", "container", "node"], "fromPod": ray_cluster},
            {"port": "metrics", "metricRelabeling": [_keep(scrape.RAY_SERIES), DROP_RAY_LABELS]},
        ),
        _pod_monitoring(
            "strata-endpoint",
            NAMESPACE,
            ENGINE_POD,
            {"metadata": ["pod", "container"], "fromPod": ray_cluster},
            {"port": "serve", "params": {"scope": ["node"]}, "metricRelabeling": [_keep(scrape.ENDPOINT_SERIES)]},
        ),
        _pod_monitoring(
            "strata-gpu",
            SHARED_NAMESPACE,
            GPU_POD,
            {"metadata": ["pod", "container"]},  # not `node`: the exporter sets it
            {"port": "gpu-metrics", "metricRelabeling": [_keep(ALL_GPU_SERIES)]},
        ),
        _pod_monitoring(
            "strata-kuberay",
            None,
            OPERATOR_POD,
            respected,
            {"port": "http", "metricRelabeling": [_keep(scrape.KUBERAY_SERIES), RAY_CLUSTER_IS_OBJECT]},
        ),
        _pod_monitoring(
            "strata-kube-state-metrics",
            None,
            KUBE_STATE_POD,
            respected,
            {"port": KUBE_STATE_PORT, "metricRelabeling": [_keep(scrape.KUBE_STATE_SERIES)]},
        ),
    ]


def _pod_monitoring(
    name: str, namespace: str | None, selector: dict[str, Any], labels: dict[str, Any], endpoint: dict[str, Any]
) -> dict[str, Any]:
    """A PodMonitoring, or without a namespace a ClusterPodMonitoring."""
    return {
        "apiVersion": "monitoring.googleapis.com/v1",
        "kind": "PodMonitoring" if namespace else "ClusterPodMonitoring",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {}), "labels": GOOGLE_LABELS},
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
            "spec": {"groups": groups()},
        }
    ]


def _keep(names: tuple[str, ...]) -> dict[str, Any]:
    return {"sourceLabels": ["__name__"], "regex": scrape.whole(names), "action": "keep"}


def groups() -> list[dict[str, Any]]:
    """Rule groups, with the evaluation intervals of a cluster. A laptop's monitor evaluates all of them at each scrape."""
    texts = [runbooks.with_base(file.read_text()) for file in sorted(rules_dir().glob("*.yaml"))]
    every = [group for text in texts for group in yaml.safe_load(text)["groups"]]
    intervals = dict.fromkeys(FLEET_GROUPS, FLEET_INTERVAL)
    return [{"interval": intervals.get(group["name"], INTERVAL), **group} for group in every]


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
