"""Cluster board: GPUs, processes, nodes and autoscaling."""

from strata.dashboards import series
from strata.dashboards.board import Board, even, row
from strata.dashboards.panels import Line, lines, number
from strata.dashboards.promql import RATE, highest, or_zero, select, summed
from strata.dashboards.style import ANY, BUSY, FULL, FULL_PERCENT, HOT, Unit
from strata.platform import metrics

GPU = ("cluster", "node", "gpu", "name")
EACH_GPU = "{{node}} gpu {{gpu}}"
PROCESS = (*GPU, "pid", "actor")
EACH_PROCESS = "{{actor}} ({{pid}}) on {{node}} gpu {{gpu}}"
EACH_NODE = "{{cluster}} {{ip}}"
NODE = ("cluster", "ip")


def condition(what: series.Series) -> str:
    """1 where the condition holds, 0 where it does not. KubeRay's operator exports the two as labels."""
    holds, fails = (highest(what, "namespace", "name", matchers=(f'condition="{word}"',)) for word in ("true", "false"))
    return f"{holds} or {fails} * 0"


def or_none(what: series.Series) -> str:
    """Number of nodes in a state, or 0. The autoscaler does not report empty states."""
    return or_zero(summed(what, "cluster"), summed(series.NODES_ACTIVE, "cluster"), "cluster")


SUMMARY = row(
    "Now",
    *even(
        4,
        (
            number(
                "Nodes",
                "Machines that report to Ray.",
                Unit.COUNT,
                Line(f"count(max by (cluster, ip) ({select(series.NODE_CPUS)}))", "nodes"),
            ),
            number("Cores", "CPU cores of all nodes.", Unit.COUNT, Line(f"sum({highest(series.NODE_CPUS, *NODE)})", "cores")),
            number(
                "GPUs",
                "GPUs reported by the drivers of all nodes.",
                Unit.COUNT,
                Line(f"sum({highest(metrics.GPU_COUNT, 'cluster', 'node')})", "GPUs"),
                empty="none seen",
            ),
            number(
                "GPU utilization",
                "Share of the time in which a kernel ran, mean over all GPUs.",
                Unit.RATIO,
                Line(f"avg({highest(series.GPU_UTILIZATION, *GPU)})", "busy"),
                BUSY,
                empty="no GPU",
            ),
            number(
                "GPU memory",
                "Share of memory in use, over all GPUs.",
                Unit.RATIO,
                Line(f"sum({highest(series.GPU_MEMORY_USED, *GPU)}) / sum({highest(series.GPU_MEMORY_TOTAL, *GPU)})", "used"),
                FULL,
                empty="no GPU",
            ),
            number(
                "GPU power",
                "Total power draw of all GPUs.",
                Unit.WATTS,
                Line(f"sum({highest(series.GPU_POWER, *GPU)})", "drawn"),
                empty="no GPU",
            ),
        ),
    ),
)

GPUS = row(
    "GPUs",
    lines(
        "Utilization",
        "Share of the time in which a kernel ran. A GPU at 100% may still use few of its multiprocessors.",
        Unit.RATIO,
        Line(highest(series.GPU_UTILIZATION, *GPU), EACH_GPU),
        top=1,
    ),
    lines(
        "Memory used",
        "Share of each card's memory in use by all processes.",
        Unit.RATIO,
        Line(f"{highest(series.GPU_MEMORY_USED, *GPU)} / {highest(series.GPU_MEMORY_TOTAL, *GPU)}", EACH_GPU),
        limits=FULL,
        top=1,
    ),
    *even(
        8,
        (
            lines(
                "Power",
                "Power draw. At the limit the GPU lowers its clock.",
                Unit.WATTS,
                Line(highest(series.GPU_POWER, *GPU), EACH_GPU),
                Line(highest(metrics.GPU_POWER_LIMIT, *GPU), f"{EACH_GPU} limit"),
            ),
            lines(
                "Temperature",
                "Chip temperature. Data-centre GPUs throttle from about 87 degrees.",
                Unit.CELSIUS,
                Line(highest(series.GPU_TEMPERATURE, *GPU), EACH_GPU),
                limits=HOT,
            ),
            lines(
                "Clock",
                "SM clock, and its maximum.",
                Unit.HERTZ,
                Line(highest(series.GPU_SM_CLOCK, *GPU), EACH_GPU),
                Line(highest(metrics.GPU_SM_CLOCK_MAX, *GPU), f"{EACH_GPU} highest"),
            ),
        ),
    ),
    lines(
        "Throttled",
        "1 while the clock of a GPU is throttled, by reason: power, thermal or hardware.",
        Unit.COUNT,
        Line(highest(series.GPU_THROTTLED, *GPU, "reason"), f"{EACH_GPU} {{{{reason}}}}"),
        limits=ANY,
        top=1,
    ),
    lines(
        "XID errors",
        "Driver errors by XID number; with DCGM, the number of the last error.",
        Unit.NONE,
        Line(
            f"sum by ({', '.join(GPU)}, xid) (increase({select(metrics.GPU_XID)}{RATE}))",
            f"{EACH_GPU} XID {{{{xid}}}}",
        ),
        Line(highest(series.DCGM_XID, "cluster", "Hostname", "gpu"), "{{Hostname}} gpu {{gpu}} last XID"),
    ),
)

PROCESSES = row(
    "GPU processes",
    lines(
        "Memory by process",
        "GPU memory of each process, by the name of its Ray actor or program.",
        Unit.BYTES,
        Line(highest(metrics.GPU_PROCESS_MEMORY, *PROCESS), EACH_PROCESS),
        stacked=True,
    ),
    lines(
        "Utilization by process",
        "Share of SM time of each process.",
        Unit.RATIO,
        Line(highest(metrics.GPU_PROCESS_UTILIZATION, *PROCESS), EACH_PROCESS),
        stacked=True,
    ),
)

NODES = row(
    "Nodes",
    lines(
        "CPU",
        "Share of all cores in use on each node.",
        Unit.PERCENT,
        Line(highest(series.NODE_CPU_PERCENT, *NODE), EACH_NODE),
        limits=FULL_PERCENT,
        top=100,
    ),
    lines(
        "Memory",
        "Share of memory in use on each node. Near 1, Ray kills workers.",
        Unit.RATIO,
        Line(f"{highest(series.NODE_MEMORY_USED, *NODE)} / {highest(series.NODE_MEMORY_TOTAL, *NODE)}", EACH_NODE),
        limits=FULL,
        top=1,
    ),
    lines(
        "Network",
        "Bytes per second that each node receives and sends.",
        Unit.BYTES_PER_SECOND,
        Line(highest(series.NODE_RECEIVED, *NODE), f"{EACH_NODE} receives"),
        Line(highest(series.NODE_SENT, *NODE), f"{EACH_NODE} sends"),
    ),
    lines(
        "Disk",
        "Share of disk in use on each node. A full disk stops checkpoints and logs.",
        Unit.PERCENT,
        Line(highest(series.NODE_DISK_PERCENT, *NODE), EACH_NODE),
        limits=FULL_PERCENT,
        top=100,
    ),
)

SCALING = row(
    "Autoscaling",
    lines(
        "Nodes by state",
        "Nodes by state, from Ray's autoscaler.",
        Unit.COUNT,
        Line(summed(series.NODES_ACTIVE, "cluster"), "{{cluster}} active"),
        Line(or_none(series.NODES_PENDING), "{{cluster}} pending"),
        Line(or_none(series.NODES_FAILED), "{{cluster}} failed"),
    ),
    lines(
        "KubeRay",
        "1 while a Ray cluster is provisioned and a Ray service ready, 0 while not; on Kubernetes only.",
        Unit.COUNT,
        Line(condition(series.CLUSTER_PROVISIONED), "cluster {{namespace}}/{{name}}"),
        Line(condition(series.SERVICE_READY), "service {{namespace}}/{{name}}"),
        Line(
            highest(series.JOB_STATUS, "namespace", "name", "deployment_status"),
            "job {{namespace}}/{{name}} {{deployment_status}}",
        ),
        top=1,
    ),
)

BOARD = Board(
    uid="strata-cluster",
    title="Strata: Cluster and GPU load",
    description="Nodes and GPUs: utilization, memory, temperature, errors and processes.",
    variables=("cluster",),
    rows=(SUMMARY, GPUS, PROCESSES, NODES, SCALING),
)
