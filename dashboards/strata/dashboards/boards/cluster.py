"""Cluster board: GPUs, processes, nodes and autoscaling, readable from one GPU to 16,384."""

from strata.dashboards import series
from strata.dashboards.board import Board, even, row
from strata.dashboards.boards.annotations import DEPLOYMENTS
from strata.dashboards.panels import Line, Panel, bars, heat, lines, number
from strata.dashboards.promql import highest, least, most, or_zero, select, spread, summed
from strata.dashboards.style import ANY, BUSY, FULL, FULL_PERCENT, HOT, Limits, Unit
from strata.platform import metrics

GPU = ("cluster", "node", "gpu")
EACH_GPU = "{{node}} gpu {{gpu}}"
GPU_NODE = ("cluster", "node")
EACH_GPU_NODE = "{{node}}"
NODE = ("cluster", "ip")
EACH_NODE = "{{cluster}} {{ip}}"
OWNER = ("cluster", "namespace", "ray_io_cluster")
EACH_OWNER = "{{namespace}} {{ray_io_cluster}}"
THERMAL = 'reason=~"thermal|hardware"'


def condition(what: series.Series) -> str:
    """1 where the condition holds, 0 where it does not. KubeRay's operator exports the two as labels."""
    holds, fails = (highest(what, "namespace", "name", matchers=(f'condition="{word}"',)) for word in ("true", "false"))
    return f"{holds} or {fails} * 0"


def or_none(what: series.Series) -> str:
    """Number of nodes in a state, or 0. The autoscaler does not report empty states."""
    return or_zero(summed(what, "cluster"), summed(series.NODES_ACTIVE, "cluster"), "cluster")


def across(
    title: str, description: str, unit: Unit, of: series.Series, limits: Limits | None = None, top: float | None = None
) -> Panel:
    """The highest, median and lowest value of many nodes. `of` is a rule with one series for each node."""
    of_nodes = (Line(expr, word) for word, expr in spread(select(of)).items())
    return lines(title, description, unit, *of_nodes, limits=limits, top=top)


def ever(what: series.Series, label: str) -> str:
    """Events of the time range. Their series exist only while there is one."""
    return f"max by (node, gpu, {label}) (max_over_time({select(what)}[$__range]))"


NODE_LOAD = highest(series.NODE_CPU, *NODE)
NODE_MEMORY = highest(series.NODE_MEMORY, *NODE)
NODE_DISK = highest(series.NODE_DISK, *NODE)

SUMMARY = row(
    "Now",
    *even(
        4,
        (
            number(
                "Nodes",
                "Machines that report to Ray.",
                Unit.COUNT,
                Line(f"count({select(series.NODE_CPU)})", "nodes"),
            ),
            number("Cores", "CPU cores of all nodes.", Unit.COUNT, Line(f"sum({highest(series.NODE_CPUS, *NODE)})", "cores")),
            number(
                "GPUs",
                "GPUs that DCGM, Strata's exporter or Ray report; if none does, the count of the drivers.",
                Unit.COUNT,
                Line(f"sum({select(series.NODE_GPUS)}) or sum({highest(metrics.GPU_COUNT, *GPU_NODE)})", "GPUs"),
                empty="none seen",
            ),
            number(
                "GPU utilization",
                "Share of the time in which a kernel ran, mean over all GPUs.",
                Unit.RATIO,
                Line(f"sum({select(series.NODE_UTILIZATION_SUM)}) / sum({select(series.NODE_GPUS)})", "busy"),
                BUSY,
                empty="no GPU",
            ),
            number(
                "GPU memory",
                "Share of memory in use, over all GPUs.",
                Unit.RATIO,
                Line(f"sum({select(series.NODE_GPU_MEMORY_USED)}) / sum({select(series.NODE_GPU_MEMORY_TOTAL)})", "used"),
                FULL,
                empty="no GPU",
            ),
            number(
                "GPU power",
                "Total power draw of all GPUs.",
                Unit.WATTS,
                Line(f"sum({select(series.NODE_POWER)})", "drawn"),
                empty="no GPU",
            ),
        ),
    ),
)

GPUS = row(
    "GPUs",
    heat(
        "Utilization distribution",
        "GPUs by the share of the time in which a kernel ran. A band at the bottom are idle GPUs.",
        f"sum by (le) ({select(series.UTILIZATION_BUCKETS)})",
        Unit.RATIO,
    ),
    lines(
        "Utilization by Ray cluster",
        "Mean over the GPUs of each Ray cluster. A GPU at 100% may still use few of its multiprocessors.",
        Unit.RATIO,
        Line(f"{summed(series.NODE_UTILIZATION_SUM, *OWNER)} / {summed(series.NODE_GPUS, *OWNER)}", EACH_OWNER),
        top=1,
    ),
    *even(
        8,
        (
            bars(
                "Least busy nodes",
                "Mean utilization of the GPUs of a node. A node that is less busy than its run has a fault, or lost its worker.",
                Unit.RATIO,
                Line(least(f"avg by ({', '.join(GPU_NODE)}) ({select(series.NODE_UTILIZATION)})"), EACH_GPU_NODE),
                limits=BUSY,
                top=1,
            ).about("StrataGpuIdleWhileTraining"),
            bars(
                "Fullest GPUs",
                "Share of memory in use by all processes.",
                Unit.RATIO,
                Line(most(f"{highest(series.GPU_MEMORY_USED, *GPU)} / {highest(series.GPU_MEMORY_TOTAL, *GPU)}"), EACH_GPU),
                limits=FULL,
                top=1,
            ).about("StrataGpuMemoryNearlyFull"),
            bars(
                "Hottest GPUs",
                "Chip temperature. Data-centre GPUs throttle from about 87 degrees.",
                Unit.CELSIUS,
                Line(most(highest(series.GPU_TEMPERATURE, *GPU)), EACH_GPU),
                limits=HOT,
                top=100,
            ),
        ),
    ),
    *even(
        8,
        (
            lines(
                "Throttled GPUs",
                "GPUs whose clock is throttled, by reason: power, thermal or hardware.",
                Unit.COUNT,
                Line(summed(series.THROTTLED_GPUS, "reason"), "{{reason}}"),
                limits=ANY,
            ).about("StrataGpuThrottled"),
            bars(
                "Throttled now",
                "GPUs throttled by heat or hardware.",
                Unit.COUNT,
                Line(
                    most(f"{highest(series.GPU_THROTTLED, *GPU, 'reason', matchers=(THERMAL,))} > 0"),
                    f"{EACH_GPU} {{{{reason}}}}",
                ),
                limits=ANY,
                top=1,
            ),
            bars(
                "XID errors",
                "GPUs with driver errors in the time range, by XID number.",
                Unit.COUNT,
                Line(most(ever(series.GPU_XID, "xid")), f"{EACH_GPU} XID {{{{xid}}}}"),
            ).about("StrataGpuXidError"),
        ),
    ),
    bars(
        "Hardware faults",
        "GPUs with uncorrected memory errors, replaced memory rows or NVLink errors in the time range.",
        Unit.COUNT,
        Line(most(ever(series.GPU_FAULTS, "fault")), f"{EACH_GPU} {{{{fault}}}}"),
    )
    .wide(24)
    .about("StrataGpuEccError", "StrataGpuRowRemapFailed", "StrataGpuRowsRemapped", "StrataGpuNvlinkErrors"),
)

HARDWARE = row(
    "Power, temperature and clocks",
    heat(
        "Temperature distribution",
        "GPUs by chip temperature. Nodes that cool badly are a band of their own.",
        f"sum by (le) ({select(series.TEMPERATURE_BUCKETS)})",
        Unit.CELSIUS,
    ),
    across(
        "Temperature by node",
        "Temperature of the hottest GPU of a node.",
        Unit.CELSIUS,
        series.NODE_TEMPERATURE,
        HOT,
    ),
    *even(
        8,
        (
            lines(
                "Power by Ray cluster",
                "Power draw of the GPUs of each Ray cluster.",
                Unit.WATTS,
                Line(summed(series.NODE_POWER, *OWNER), EACH_OWNER),
                stacked=True,
            ),
            bars(
                "Power drawn and allowed",
                "Total power draw, and the total of the power limits that Strata's exporter reports.",
                Unit.WATTS,
                Line(f"sum({select(series.NODE_POWER)})", "drawn"),
                Line(f"sum({highest(metrics.GPU_POWER_LIMIT, *GPU)})", "limit"),
            ),
            bars(
                "Slowest clocks",
                "SM clock. In a training run, one slow GPU slows all.",
                Unit.HERTZ,
                Line(least(highest(series.GPU_SM_CLOCK, *GPU)), EACH_GPU),
                Line(f"max({select(metrics.GPU_SM_CLOCK_MAX)})", "highest possible"),
            ),
        ),
    ),
    across(
        "Clock by node",
        "SM clock of the slowest GPU of a node.",
        Unit.HERTZ,
        series.NODE_SM_CLOCK,
    ).wide(24),
    collapsed=True,
)


PROCESSES = row(
    "GPU processes",
    bars(
        "Memory by actor",
        "GPU memory by the name of the Ray actor or program, over all GPUs.",
        Unit.BYTES,
        Line(most(summed(series.GPU_ACTOR_MEMORY, "cluster", "actor")), "{{actor}}"),
    ),
    bars(
        "Utilization by actor",
        "Mean share of SM time by the name of the Ray actor or program.",
        Unit.RATIO,
        Line(most(f"avg by (cluster, actor) ({select(series.GPU_ACTOR_UTILIZATION)})"), "{{actor}}"),
        top=1,
    ),
    collapsed=True,
)

NODES = row(
    "Nodes",
    across("CPU", "Share of all cores in use on a node.", Unit.PERCENT, series.NODE_CPU, FULL_PERCENT, 100),
    across("Memory", "Share of memory in use on a node. Near 1, Ray kills workers.", Unit.RATIO, series.NODE_MEMORY, FULL, 1),
    lines(
        "Network",
        "Bytes per second that the nodes of each Ray cluster receive and send.",
        Unit.BYTES_PER_SECOND,
        Line(summed(series.NODE_RECEIVED, *OWNER), f"{EACH_OWNER} receives"),
        Line(summed(series.NODE_SENT, *OWNER), f"{EACH_OWNER} sends"),
    ),
    across(
        "Disk",
        "Share of disk in use on a node. A full disk stops checkpoints and logs.",
        Unit.PERCENT,
        series.NODE_DISK,
        FULL_PERCENT,
        100,
    ).about("StrataDiskFilling", "StrataDiskFull"),
    *even(
        8,
        (
            bars("Busiest CPUs", "Share of all cores in use.", Unit.PERCENT, Line(most(NODE_LOAD), EACH_NODE), top=100),
            bars("Fullest RAM", "Share of memory in use.", Unit.RATIO, Line(most(NODE_MEMORY), EACH_NODE), limits=FULL, top=1),
            bars(
                "Fullest disks",
                "Share of disk in use.",
                Unit.PERCENT,
                Line(most(NODE_DISK), EACH_NODE),
                limits=FULL_PERCENT,
                top=100,
            ),
        ),
    ),
    collapsed=True,
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
    ).about("StrataAutoscalerStuck"),
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
    ).about("StrataClusterNotProvisioned", "StrataServiceNotReady", "StrataJobFailed"),
    collapsed=True,
)

BOARD = Board(
    uid="strata-cluster",
    title="Strata: Cluster and GPU load",
    description="Nodes and GPUs: utilization, memory, temperature, errors and processes.",
    variables=("cluster", "ray_cluster", "team", "node"),
    rows=(SUMMARY, GPUS, HARDWARE, PROCESSES, NODES, SCALING),
    annotations=(DEPLOYMENTS,),
)
