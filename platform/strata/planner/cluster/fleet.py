"""Plan of a fleet of GPUs: Ray and Kubernetes clusters, monitoring, checkpoint storage, failures and spares.

The fleet trains equal runs, as many as fit. A run is one Ray cluster, so it has at most the nodes and actors of one. Every figure
is a line of the worksheet.
"""

from dataclasses import dataclass

from strata.planner import ranges
from strata.planner.catalogue.fleets import FLEETS, Rates
from strata.planner.cluster import limits
from strata.planner.cluster.limits import Figure
from strata.planner.reliability.failures import USUAL, FailurePlan, Recovery, plan_failures
from strata.planner.serving.queueing import poisson_at_most, smallest
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError

DAY = 86_400.0


@dataclass(frozen=True)
class Watched:
    """Settings of the monitoring."""

    scrape_s: float = 15.0  # as in infra/components/monitoring
    retention_days: float = 15.0  # Prometheus's default


@dataclass(frozen=True)
class Stored:
    """Settings of the checkpoint store. `bandwidth` is the total for all runs; None: as much as the two limits require."""

    stalled: float = 0.01  # share of time that saves may stall training
    most_save_s: float = 300.0  # of a whole save, and of a load at a restart
    checkpoints: int = 3  # newest ones that a run retains: the recipe's default
    bandwidth: float | None = None


@dataclass(frozen=True)
class ClusterPlan:
    """`failures` is the plan of one run."""

    gpus: int
    run_gpus: int
    runs: int
    ray_clusters: int
    kubernetes_clusters: int
    head_cpus: int
    head_bytes: float
    series: float
    samples_per_s: float
    shards: int
    shard_memory_bytes: float
    shard_disk_bytes: float
    remote_write_senders: int
    state_bytes: float
    storage_bytes: float
    storage_bandwidth: float
    interval_s: float
    failures_per_day: float
    replaced_nodes_per_day: float
    spares: int
    nodes_to_add: int
    goodput: float
    failures: FailurePlan
    worksheet: Worksheet


def plan_cluster(
    gpus: int,
    state_bytes: float,
    step_s: float,
    run_gpus: int | None = None,
    rates: Rates = FLEETS["llama3"],
    recovery: Recovery = USUAL,
    watched: Watched | None = None,
    stored: Stored | None = None,
) -> ClusterPlan:
    """`state_bytes`: one checkpoint of a run. `run_gpus`: GPUs of one run; None: as many as one Ray cluster can have."""
    ranges.FLEET_GPUS.check("--gpus", gpus)
    ranges.BYTES.check("--state", state_bytes)
    top = Worksheet(f"a fleet of {gpus} GPUs")
    top.given("gpus", gpus)
    top.given("gpus_per_node", recovery.gpus_per_node)
    top.work_out("nodes", "ceil(gpus / gpus_per_node)")
    control = _control_planes(top, run_gpus)
    monitoring = _monitoring(top, watched or Watched())
    storage = _storage(top, rates, recovery, state_bytes, stored or Stored())
    found = plan_failures(
        int(top["run_gpus"]),
        state_bytes,
        step_s,
        storage["run_bandwidth"],
        worksheet=top,
        rates=rates,
        recovery=recovery,
    )
    spares = _spares(top, rates, found, recovery)
    return ClusterPlan(
        gpus=gpus,
        run_gpus=int(top["run_gpus"]),
        runs=int(top["runs"]),
        ray_clusters=int(control["ray_clusters"]),
        kubernetes_clusters=int(control["kubernetes_clusters"]),
        head_cpus=int(control["head_cpus"]),
        head_bytes=control["head_bytes"],
        series=monitoring["series"],
        samples_per_s=monitoring["samples_per_s"],
        shards=int(monitoring["shards"]),
        shard_memory_bytes=monitoring["shard_memory_bytes"],
        shard_disk_bytes=monitoring["shard_disk_bytes"],
        remote_write_senders=int(monitoring["remote_write_senders"]),
        state_bytes=state_bytes,
        storage_bytes=storage["storage_bytes"],
        storage_bandwidth=storage["storage_bandwidth"],
        interval_s=found.best.interval_s,
        failures_per_day=spares["failures_per_day"],
        replaced_nodes_per_day=spares["replaced_nodes_per_day"],
        spares=int(spares["fleet_spares"]),
        nodes_to_add=int(spares["nodes_to_add"]),
        goodput=found.goodput,
        failures=found,
        worksheet=top,
    )


def _cite(part: Worksheet, name: str, figure: Figure, unit: str = "") -> None:
    part.given(name, figure.value, unit, figure.source)


def _control_planes(top: Worksheet, run_gpus: int | None) -> Worksheet:
    _cite(top, "ray_nodes", limits.RAY_NODES)
    _cite(top, "ray_actors", limits.RAY_ACTORS)
    _cite(top, "actors_per_gpu", limits.ACTORS_PER_GPU)
    most = top.work_out(
        "most_run_gpus",
        "min(ray_nodes * gpus_per_node, floor(ray_actors / actors_per_gpu))",
        "",
        "GPUs of the largest run: a run is one Ray cluster",
    )
    if run_gpus is not None and run_gpus > top["gpus"]:
        raise UserError(f"--run-gpus {run_gpus:,} exceeds --gpus {top['gpus']:,.0f}.", "Use fewer --run-gpus or more --gpus.")
    if run_gpus is not None and run_gpus > most:
        raise UserError(
            f"--run-gpus {run_gpus:,} exceeds what one Ray cluster holds: {most:,.0f} GPUs.",
            f"Use at most --run-gpus {most:.0f}.",
        )
    top.given("run_gpus", min(top["gpus"], most) if run_gpus is None else run_gpus, "", "GPUs of one run")
    top.work_out("runs", "floor(gpus / run_gpus)", "", "equal runs that train at the same time")
    part = top.part("control planes")
    part.work_out(
        "ray_clusters", "runs + ceil((gpus - runs * run_gpus) / most_run_gpus)", "", "one per run, and for the other GPUs"
    )
    part.work_out("nodes_per_cluster", "ceil(run_gpus / gpus_per_node)", "", "of a run, without its head")
    _cite(part, "small_head_cpus", limits.HEAD_CPUS)
    _cite(part, "small_head_bytes", limits.HEAD_BYTES, "B")
    _cite(part, "large_head_cpus", limits.LARGE_HEAD_CPUS)
    _cite(part, "large_head_bytes", limits.LARGE_HEAD_BYTES, "B")
    part.work_out("of_limit", "min(1, nodes_per_cluster / ray_nodes)", "", "share of Ray's limit")
    why = "between Ray's two heads in proportion: an assumption"
    part.work_out("head_cpus", "ceil(small_head_cpus + of_limit * (large_head_cpus - small_head_cpus))", "", why)
    part.work_out("head_bytes", "small_head_bytes + of_limit * (large_head_bytes - small_head_bytes)", "B", why)
    _cite(part, "kubernetes_nodes", limits.KUBERNETES_NODES)
    part.work_out("runs_per_kubernetes", "floor(kubernetes_nodes / (nodes_per_cluster + 1))", "", "with a node for each head")
    formula = "max(ceil(runs / runs_per_kubernetes), ceil((nodes + ray_clusters) / kubernetes_nodes))"
    part.work_out("kubernetes_clusters", formula, "", "a run lies in one of them")
    _cite(part, "lease_s", limits.LEASE_S, "s")
    part.work_out(
        "lease_writes_per_s", "(nodes + ray_clusters) / kubernetes_clusters / lease_s", "/s", "to one kube-apiserver, when idle"
    )
    return part


def _monitoring(top: Worksheet, watched: Watched) -> Worksheet:
    part = top.part("monitoring")
    _cite(part, "series_per_gpu", limits.SERIES_PER_GPU)
    _cite(part, "series_per_node", limits.SERIES_PER_NODE)
    _cite(part, "series_per_run", limits.SERIES_PER_RUN)
    part.work_out("series", "gpus * series_per_gpu + nodes * series_per_node + runs * series_per_run")
    part.given("scrape_s", watched.scrape_s, "s")
    part.work_out("samples_per_s", "series / scrape_s", "/s")
    _cite(part, "series_per_shard", limits.SERIES_PER_SHARD)
    part.work_out("shards", "ceil(series / series_per_shard)", "", "Prometheus servers, without replicas")
    part.work_out("shard_series", "series / shards")
    _cite(part, "bytes_per_series", limits.BYTES_PER_SERIES, "B")
    _cite(part, "remote_write_memory", limits.REMOTE_WRITE_MEMORY)
    _cite(part, "query_memory", limits.QUERY_MEMORY)
    part.work_out("shard_memory_bytes", "shard_series * bytes_per_series * remote_write_memory * query_memory", "B", "a request")
    part.given("retention_s", watched.retention_days * DAY, "s")
    _cite(part, "bytes_per_sample", limits.BYTES_PER_SAMPLE, "B")
    _cite(part, "wal_bytes_per_sample", limits.WAL_BYTES_PER_SAMPLE, "B")
    _cite(part, "wal_s", limits.WAL_S, "s")
    formula = "samples_per_s / shards * (retention_s * bytes_per_sample + wal_s * wal_bytes_per_sample)"
    part.work_out("shard_disk_bytes", formula, "B", "blocks and write-ahead log")
    _cite(part, "samples_per_send", limits.SAMPLES_PER_SEND)
    _cite(part, "send_s", limits.SEND_S, "s")
    why = "parallel senders of one server (max_shards in its remote_write queue)"
    part.work_out("remote_write_senders", "ceil(samples_per_s / shards * send_s / samples_per_send)", "", why)
    return part


def _storage(top: Worksheet, rates: Rates, recovery: Recovery, state_bytes: float, stored: Stored) -> Worksheet:
    """Saves at Young's interval stall training for sqrt(stall / (2 mtbf)) of the time. That gives the longest stall, and from it
    the bandwidth."""
    part = top.part("checkpoint storage")
    part.given("state_bytes", state_bytes, "B", "one copy of weights and optimizer state")
    part.given("checkpoints", stored.checkpoints, "", "that a run retains, beside the one being written")
    part.work_out("storage_bytes", "runs * (checkpoints + 1) * state_bytes", "B", "of all runs; without data and exports")
    part.given("failures_per_gpu_hour", rates.total, "", rates.source)
    part.work_out("mtbf_s", "3600 / (run_gpus * failures_per_gpu_hour)", "s", "of a run")
    part.given("stalled", stored.stalled, "", "share of time that saves may stall training")
    part.given("stall_share", recovery.stall_share, "", "share of an asynchronous save that stalls training")
    part.work_out("stall_s", "2 * mtbf_s * stalled ** 2", "s", "sqrt(stall_s / (2 * mtbf_s)) = stalled, at Young's interval")
    part.work_out("young_s", "sqrt(2 * stall_s * mtbf_s)", "s", "Young's interval")
    part.given("most_save_s", stored.most_save_s, "s", "a restart loads for as long")
    why = "longest save: by its stall, one save at a time, and by the limit"
    part.work_out("longest_save_s", "min(stall_s / stall_share, young_s, most_save_s)", "s", why)
    part.work_out("least_bandwidth", "runs * state_bytes / longest_save_s", "B/s", "if all runs save at once")
    part.work_out("mean_bandwidth", "runs * state_bytes / young_s", "B/s", "averaged over time")
    if stored.bandwidth is None:
        part.work_out("storage_bandwidth", "least_bandwidth", "B/s")
    else:
        part.given("storage_bandwidth", stored.bandwidth, "B/s", "of the whole store")
    part.work_out("run_bandwidth", "storage_bandwidth / runs", "B/s", "of one run while all save")
    return part


def _spares(top: Worksheet, rates: Rates, run: FailurePlan, recovery: Recovery) -> Worksheet:
    part = top.part("failures of the fleet")
    part.given("failures_per_gpu_hour", rates.total, "", rates.source)
    part.given("hardware_share", rates.hardware / rates.total, "", "share of failures after which a node must be replaced")
    part.work_out("failures_per_day", "gpus * failures_per_gpu_hour * 24")
    part.work_out("replaced_nodes_per_day", "failures_per_day * hardware_share")
    part.given("repair_s", recovery.repair_s, "s")
    out = part.work_out("nodes_in_repair", "replaced_nodes_per_day * repair_s / 86400", "", "on average, by Little's law")
    needed = smallest(lambda count: poisson_at_most(count - 1, out) >= recovery.confidence, int(ranges.FLEET_GPUS.most))
    assert needed is not None, "nodes in repair exceed the fleet"
    why = f"shared by all runs: one is free when a node fails with probability {recovery.confidence:.4g} (Poisson)"
    part.given("fleet_spares", needed, "", why)
    part.given("run_spares", run.spares, "", "nodes, if every run had its own")
    part.work_out("separate_spares", "runs * run_spares", "", "for comparison")
    part.work_out("nodes_beside_runs", "floor((gpus - runs * run_gpus) / gpus_per_node)", "", "not used by the runs")
    part.work_out("nodes_to_add", "max(0, fleet_spares - nodes_beside_runs)", "", "spares that the fleet lacks")
    return part
