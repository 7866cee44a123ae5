"""Series of other programs and of recording rules that dashboards read, each with its source.

`strata.platform.metrics` has Strata's own metrics. Labels are those that queries may use. Every scrape adds `cluster`, except
that of KubeRay's operator, which serves many clusters.
"""

from dataclasses import dataclass
from typing import Literal

from strata.platform.metrics import Metric

Source = Literal["ray", "autoscaler", "kuberay", "dcgm", "gpu rules", "slo rules", "alerts"]


@dataclass(frozen=True)
class Series:
    exported: str
    labels: tuple[str, ...]
    source: Source


Readable = Metric | Series

# Ray's reporter agent, one per node: ray/dashboard/modules/reporter/reporter_agent.py, labels in ray/dashboard/consts.py.
NODE = ("cluster", "ip", "IsHeadNode", "RayNodeType", "SessionName")
NODE_CPU_PERCENT = Series("ray_node_cpu_utilization", NODE, "ray")  # 0 to 100
NODE_CPUS = Series("ray_node_cpu_count", NODE, "ray")
NODE_MEMORY_USED = Series("ray_node_mem_used", NODE, "ray")
NODE_MEMORY_TOTAL = Series("ray_node_mem_total", NODE, "ray")
NODE_DISK_PERCENT = Series("ray_node_disk_utilization_percentage", NODE, "ray")
NODE_RECEIVED = Series("ray_node_network_receive_speed", NODE, "ray")  # bytes per second
NODE_SENT = Series("ray_node_network_send_speed", NODE, "ray")

# The same agent on the head node, from the autoscaler's report.
AUTOSCALER = ("cluster", "node_type", "SessionName")
NODES_ACTIVE = Series("ray_cluster_active_nodes", AUTOSCALER, "autoscaler")
NODES_PENDING = Series("ray_cluster_pending_nodes", AUTOSCALER, "autoscaler")
NODES_FAILED = Series("ray_cluster_failed_nodes", AUTOSCALER, "autoscaler")

# KubeRay's operator: ray-operator/controllers/ray/metrics. The value is always 1; the label has the state of the condition.
CLUSTER_PROVISIONED = Series("kuberay_cluster_condition_provisioned", ("name", "namespace", "condition"), "kuberay")
SERVICE_READY = Series("kuberay_service_condition_ready", ("name", "namespace", "condition"), "kuberay")
JOB_STATUS = Series("kuberay_job_deployment_status", ("name", "namespace", "deployment_status"), "kuberay")

# NVIDIA's DCGM exporter. The XID of the last error, or 0. Strata's exporter counts errors instead.
DCGM_XID = Series("DCGM_FI_DEV_XID_ERRORS", ("cluster", "Hostname", "gpu", "modelName"), "dcgm")

# Recording rules, infra/prometheus/rules: series of Strata's GPU exporter, DCGM and Ray under one name.
GPU = ("cluster", "namespace", "ray_io_cluster", "node", "gpu", "name")
GPU_UTILIZATION = Series("strata:gpu:utilization", GPU, "gpu rules")
GPU_MEMORY_USED = Series("strata:gpu:memory_used_bytes", GPU, "gpu rules")
GPU_MEMORY_TOTAL = Series("strata:gpu:memory_total_bytes", GPU, "gpu rules")
GPU_POWER = Series("strata:gpu:power_watts", GPU, "gpu rules")
GPU_TEMPERATURE = Series("strata:gpu:temperature_celsius", GPU, "gpu rules")
GPU_SM_CLOCK = Series("strata:gpu:sm_clock_hertz", GPU, "gpu rules")
GPU_THROTTLED = Series("strata:gpu:throttled", (*GPU, "reason"), "gpu rules")

# Recording rules: the share of TTFT and of ITL observations that missed their objective.
SLO = ("cluster", "model")
WINDOWS = ("5m", "30m", "1h", "6h")
FIRST_TOKEN_MISSES = {
    window: Series(f"strata:serve_first_token:slo_miss_ratio_rate{window}", SLO, "slo rules") for window in WINDOWS
}
INTER_TOKEN_MISSES = {
    window: Series(f"strata:serve_inter_token:slo_miss_ratio_rate{window}", SLO, "slo rules") for window in WINDOWS
}

# Prometheus itself: one series per pending or firing alert, with the alert's own labels besides these.
ALERTS = Series("ALERTS", ("cluster", "alertname", "alertstate", "severity"), "alerts")

EVERY = (
    *(NODE_CPU_PERCENT, NODE_CPUS, NODE_MEMORY_USED, NODE_MEMORY_TOTAL, NODE_DISK_PERCENT, NODE_RECEIVED, NODE_SENT),
    *(NODES_ACTIVE, NODES_PENDING, NODES_FAILED),
    *(CLUSTER_PROVISIONED, SERVICE_READY, JOB_STATUS),
    DCGM_XID,
    *(GPU_UTILIZATION, GPU_MEMORY_USED, GPU_MEMORY_TOTAL, GPU_POWER, GPU_TEMPERATURE, GPU_SM_CLOCK, GPU_THROTTLED),
    *FIRST_TOKEN_MISSES.values(),
    *INTER_TOKEN_MISSES.values(),
    ALERTS,
)
