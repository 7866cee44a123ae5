"""Series of other programs and of recording rules that dashboards read, each with its source.

`strata.platform.metrics` has Strata's own metrics. Labels are those that queries may use. Every scrape adds `cluster`, except
that of KubeRay's operator, which serves many clusters. On Kubernetes, series of Ray's pods also have `ray_io_cluster`, the name
of the RayCluster, and `namespace`, which is the team.
"""

from dataclasses import dataclass
from typing import Literal

from strata.platform.metrics import Metric

Source = Literal["ray", "autoscaler", "kuberay", "gpu rules", "fleet rules", "team rules", "slo rules", "alerts"]


@dataclass(frozen=True)
class Series:
    exported: str
    labels: tuple[str, ...]
    source: Source


Readable = Metric | Series

# Ray's reporter agent, one per node: ray/dashboard/modules/reporter/reporter_agent.py, labels in ray/dashboard/consts.py.
POD = ("cluster", "ray_io_cluster", "namespace")
NODE = (*POD, "node", "ip", "IsHeadNode", "RayNodeType", "SessionName")
NODE_CPUS = Series("ray_node_cpu_count", NODE, "ray")
NODE_RECEIVED = Series("ray_node_network_receive_speed", NODE, "ray")  # bytes per second
NODE_SENT = Series("ray_node_network_send_speed", NODE, "ray")

# The same agent on the head node, from the autoscaler's report.
AUTOSCALER = (*POD, "node_type", "SessionName")
NODES_ACTIVE = Series("ray_cluster_active_nodes", AUTOSCALER, "autoscaler")
NODES_PENDING = Series("ray_cluster_pending_nodes", AUTOSCALER, "autoscaler")
NODES_FAILED = Series("ray_cluster_failed_nodes", AUTOSCALER, "autoscaler")

# KubeRay's operator: ray-operator/controllers/ray/metrics. The value is always 1; the label has the state of the condition.
CLUSTER_PROVISIONED = Series("kuberay_cluster_condition_provisioned", ("name", "namespace", "condition"), "kuberay")
SERVICE_READY = Series("kuberay_service_condition_ready", ("name", "namespace", "condition"), "kuberay")
JOB_STATUS = Series("kuberay_job_deployment_status", ("name", "namespace", "deployment_status"), "kuberay")

# Recording rules, gpu.yaml: series of Strata's GPU exporter, DCGM and Ray under one name. One series per GPU, so dashboards read
# them at one instant only. `namespace` and `ray_io_cluster` are those of the pod that uses the GPU.
GPU = (*POD, "node", "gpu", "name")
GPU_MEMORY_USED = Series("strata:gpu:memory_used_bytes", GPU, "gpu rules")
GPU_MEMORY_TOTAL = Series("strata:gpu:memory_total_bytes", GPU, "gpu rules")
GPU_TEMPERATURE = Series("strata:gpu:temperature_celsius", GPU, "gpu rules")
GPU_SM_CLOCK = Series("strata:gpu:sm_clock_hertz", GPU, "gpu rules")
GPU_THROTTLED = Series("strata:gpu:throttled", (*GPU, "reason"), "gpu rules")
GPU_ACTOR_UTILIZATION = Series("strata:gpu_actor:utilization", (*POD, "node", "gpu", "actor"), "gpu rules")
GPU_ACTOR_MEMORY = Series("strata:gpu_actor:memory_used_bytes", (*POD, "node", "gpu", "actor"), "gpu rules")
# Only where there is a fault.
GPU_FAULTS = Series("strata:gpu:faults", ("node", "gpu", "name", "fault"), "gpu rules")
GPU_XID = Series("strata:gpu:xid_errors", ("node", "gpu", "name", "xid"), "gpu rules")
PER_GPU = (
    *(GPU_MEMORY_USED, GPU_MEMORY_TOTAL, GPU_TEMPERATURE, GPU_SM_CLOCK, GPU_THROTTLED),
    *(GPU_ACTOR_UTILIZATION, GPU_ACTOR_MEMORY, GPU_FAULTS, GPU_XID),
)

# Recording rules, fleet.yaml: the GPUs of a node, and the numbers of GPUs up to a bound. Few enough for a range of hours.
GPU_NODE = (*POD, "node")
RAY_NODE = (*GPU_NODE, "ip")
NODE_CPU = Series("strata:node_cpu:percent", RAY_NODE, "fleet rules")  # 0 to 100
NODE_MEMORY = Series("strata:node_memory:ratio", RAY_NODE, "fleet rules")
NODE_DISK = Series("strata:node_disk:percent", RAY_NODE, "fleet rules")  # 0 to 100
NODE_GPUS = Series("strata:node_gpus:count", GPU_NODE, "fleet rules")
NODE_UTILIZATION = Series("strata:node_gpu_utilization:avg", GPU_NODE, "fleet rules")
NODE_UTILIZATION_SUM = Series("strata:node_gpu_utilization:sum", GPU_NODE, "fleet rules")
NODE_GPU_MEMORY_USED = Series("strata:node_gpu_memory_used:bytes", GPU_NODE, "fleet rules")
NODE_GPU_MEMORY_TOTAL = Series("strata:node_gpu_memory_total:bytes", GPU_NODE, "fleet rules")
NODE_POWER = Series("strata:node_gpu_power:watts", GPU_NODE, "fleet rules")
NODE_TEMPERATURE = Series("strata:node_gpu_temperature:max", GPU_NODE, "fleet rules")
NODE_SM_CLOCK = Series("strata:node_gpu_sm_clock:min", GPU_NODE, "fleet rules")
THROTTLED_GPUS = Series("strata:gpus_throttled:count", (*POD, "reason"), "fleet rules")
UTILIZATION_BUCKETS = Series("strata:gpu_utilization:bucket", (*POD, "le"), "fleet rules")
TEMPERATURE_BUCKETS = Series("strata:gpu_temperature:bucket", (*POD, "le"), "fleet rules")

# Recording rules, teams.yaml and prices.yaml. `sum5m` is the amount of the last 5 minutes.
TEAM = (*POD, "name")
TEAM_GPUS = Series("strata:team_gpus:count", TEAM, "team rules")
TEAM_IDLE_GPUS = Series("strata:team_gpus_idle:count", TEAM, "team rules")
TEAM_POWER = Series("strata:team_power:watts", TEAM, "team rules")
TEAM_GPU_HOURS = Series("strata:team_gpu_hours:sum5m", TEAM, "team rules")
TEAM_IDLE_HOURS = Series("strata:team_idle_gpu_hours:sum5m", TEAM, "team rules")
TEAM_ENERGY = Series("strata:team_energy_kwh:sum5m", TEAM, "team rules")
TEAM_COST = Series("strata:team_cost_dollars:sum5m", TEAM, "team rules")
TEAM_IDLE_COST = Series("strata:team_idle_cost_dollars:sum5m", TEAM, "team rules")
TEAM_COST_RATE = Series("strata:team_cost:dollars_per_hour", TEAM, "team rules")
TEAM_IDLE_COST_RATE = Series("strata:team_idle_cost:dollars_per_hour", TEAM, "team rules")

# Recording rules: the share of TTFT and of ITL observations, of requests and of time that missed their objective.
SLO = (*POD, "model")
WINDOWS = ("5m", "30m", "1h", "6h")
FIRST_TOKEN_MISSES = {
    window: Series(f"strata:serve_first_token:slo_miss_ratio_rate{window}", SLO, "slo rules") for window in WINDOWS
}
INTER_TOKEN_MISSES = {
    window: Series(f"strata:serve_inter_token:slo_miss_ratio_rate{window}", SLO, "slo rules") for window in WINDOWS
}
ERRORS = {window: Series(f"strata:serve_errors:ratio_rate{window}", SLO, "slo rules") for window in WINDOWS}
UNAVAILABLE = {window: Series(f"strata:serve_unavailable:ratio{window}", SLO, "slo rules") for window in WINDOWS}
OBJECTIVES = (FIRST_TOKEN_MISSES, INTER_TOKEN_MISSES, ERRORS, UNAVAILABLE)

# Prometheus itself: one series per pending or firing alert, with the alert's own labels besides these.
ALERTS = Series("ALERTS", ("cluster", "alertname", "alertstate", "severity"), "alerts")

EVERY = (
    *(NODE_CPUS, NODE_RECEIVED, NODE_SENT),
    *(NODES_ACTIVE, NODES_PENDING, NODES_FAILED),
    *(CLUSTER_PROVISIONED, SERVICE_READY, JOB_STATUS),
    *PER_GPU,
    *(NODE_CPU, NODE_MEMORY, NODE_DISK),
    *(NODE_GPUS, NODE_UTILIZATION, NODE_UTILIZATION_SUM, NODE_GPU_MEMORY_USED, NODE_GPU_MEMORY_TOTAL),
    *(NODE_POWER, NODE_TEMPERATURE, NODE_SM_CLOCK),
    *(THROTTLED_GPUS, UTILIZATION_BUCKETS, TEMPERATURE_BUCKETS),
    *(TEAM_GPUS, TEAM_IDLE_GPUS, TEAM_POWER, TEAM_GPU_HOURS, TEAM_IDLE_HOURS, TEAM_ENERGY, TEAM_COST, TEAM_IDLE_COST),
    *(TEAM_COST_RATE, TEAM_IDLE_COST_RATE),
    *(missed for misses in OBJECTIVES for missed in misses.values()),
    ALERTS,
)
