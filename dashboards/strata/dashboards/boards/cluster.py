"""What the machines do: nodes, their cores and memory, and above all the GPUs, which is where the money is."""

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
    """1 where it holds and 0 where it does not; the operator says both with a label."""
    holds, fails = (highest(what, "namespace", "name", matchers=(f'condition="{word}"',)) for word in ("true", "false"))
    return f"{holds} or {fails} * 0"


def or_none(what: series.Series) -> str:
    """The autoscaler does not report nodes of a state that none is in."""
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
                "GPUs that the nodes' drivers show, by our exporter.",
                Unit.COUNT,
                Line(f"sum({highest(metrics.GPU_COUNT, 'cluster', 'node')})", "GPUs"),
                empty="none seen",
            ),
            number(
                "GPU utilisation",
                "Mean over all GPUs of the share of time in which a kernel ran.",
                Unit.RATIO,
                Line(f"avg({highest(series.GPU_UTILIZATION, *GPU)})", "busy"),
                BUSY,
                empty="no GPU",
            ),
            number(
                "GPU memory",
                "Memory in use on all GPUs, over what they have.",
                Unit.RATIO,
                Line(f"sum({highest(series.GPU_MEMORY_USED, *GPU)}) / sum({highest(series.GPU_MEMORY_TOTAL, *GPU)})", "used"),
                FULL,
                empty="no GPU",
            ),
            number(
                "GPU power",
                "Power that all GPUs draw together.",
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
        "Utilisation",
        "Share of the time in which a kernel ran; a busy GPU may still use few of its multiprocessors.",
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
                "Power drawn; at the limit the card slows its clock.",
                Unit.WATTS,
                Line(highest(series.GPU_POWER, *GPU), EACH_GPU),
                Line(highest(metrics.GPU_POWER_LIMIT, *GPU), f"{EACH_GPU} limit"),
            ),
            lines(
                "Temperature",
                "Temperature of the chip; from about 87 degrees data-centre cards slow down.",
                Unit.CELSIUS,
                Line(highest(series.GPU_TEMPERATURE, *GPU), EACH_GPU),
                limits=HOT,
            ),
            lines(
                "Clock",
                "Clock of the multiprocessors, and the highest that the card allows.",
                Unit.HERTZ,
                Line(highest(series.GPU_SM_CLOCK, *GPU), EACH_GPU),
                Line(highest(metrics.GPU_SM_CLOCK_MAX, *GPU), f"{EACH_GPU} highest"),
            ),
        ),
    ),
    lines(
        "Throttled",
        "1 while a GPU's clock is held down, by reason: power, thermal or hardware.",
        Unit.COUNT,
        Line(highest(series.GPU_THROTTLED, *GPU, "reason"), f"{EACH_GPU} {{{{reason}}}}"),
        limits=ANY,
        top=1,
    ),
    lines(
        "XID errors",
        "Errors the driver reported, by XID number; with DCGM, the number of the last one.",
        Unit.NONE,
        Line(
            f"sum by ({', '.join(GPU)}, xid) (increase({select(metrics.GPU_XID)}{RATE}))",
            f"{EACH_GPU} XID {{{{xid}}}}",
        ),
        Line(highest(series.DCGM_XID, "cluster", "Hostname", "gpu"), "{{Hostname}} gpu {{gpu}} last XID"),
    ),
)

PROCESSES = row(
    "Who uses the GPUs",
    lines(
        "Memory by process",
        "Memory of each process on a card; a Ray actor by its name, else the program's.",
        Unit.BYTES,
        Line(highest(metrics.GPU_PROCESS_MEMORY, *PROCESS), EACH_PROCESS),
        stacked=True,
    ),
    lines(
        "Utilisation by process",
        "Share of the multiprocessors' time that each process had.",
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
        "Share of memory in use on each node; near 1, Ray kills workers.",
        Unit.RATIO,
        Line(f"{highest(series.NODE_MEMORY_USED, *NODE)} / {highest(series.NODE_MEMORY_TOTAL, *NODE)}", EACH_NODE),
        limits=FULL,
        top=1,
    ),
    lines(
        "Network",
        "Bytes a second that each node receives and sends.",
        Unit.BYTES_PER_SECOND,
        Line(highest(series.NODE_RECEIVED, *NODE), f"{EACH_NODE} receives"),
        Line(highest(series.NODE_SENT, *NODE), f"{EACH_NODE} sends"),
    ),
    lines(
        "Disk",
        "Share of each node's disk in use; full, it stops checkpoints and logs.",
        Unit.PERCENT,
        Line(highest(series.NODE_DISK_PERCENT, *NODE), EACH_NODE),
        limits=FULL_PERCENT,
        top=100,
    ),
)

SCALING = row(
    "Growing and shrinking",
    lines(
        "Nodes by state",
        "As Ray's autoscaler sees them; nodes that stay pending do not come.",
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
    description="Nodes and GPUs: what is busy, full, hot or failing, and who uses it.",
    variables=("cluster",),
    rows=(SUMMARY, GPUS, PROCESSES, NODES, SCALING),
)
