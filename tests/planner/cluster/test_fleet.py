"""Plan of a fleet: limits of control planes, monitoring, storage, failures and spares, at every size."""

import math
import re
from pathlib import Path

import pytest

from strata.planner.catalogue.fleets import FLEETS
from strata.planner.cluster import limits
from strata.planner.cluster.fleet import ClusterPlan, Stored, Watched, plan_cluster
from strata.planner.reliability.failures import USUAL, plan_failures
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError

STATE = 5.6e12
SIZES = [1, 7, 8, 100, 1024, 15_999, 16_000, 16_001, 100_000, 1_000_000]


def part(plan: ClusterPlan, title: str) -> Worksheet:
    return next(part for part in plan.worksheet.parts if part.title == title)


@pytest.mark.parametrize("gpus", SIZES)
def test_every_size_is_planned_within_the_limits(gpus: int) -> None:
    plan = plan_cluster(gpus, STATE, 10.0)
    nodes = math.ceil(gpus / 8)
    assert plan.runs * plan.run_gpus <= gpus < (plan.runs + 1) * plan.run_gpus
    assert plan.run_gpus <= 8 * limits.RAY_NODES.value and plan.run_gpus <= limits.RAY_ACTORS.value
    assert plan.ray_clusters * 8 * limits.RAY_NODES.value >= gpus
    assert plan.kubernetes_clusters * limits.KUBERNETES_NODES.value >= nodes + plan.ray_clusters
    assert plan.series / plan.shards <= limits.SERIES_PER_SHARD.value
    assert plan.shards == 1 or plan.series / (plan.shards - 1) > limits.SERIES_PER_SHARD.value
    assert 0 < plan.goodput <= 1
    assert plan.failures_per_day == pytest.approx(gpus * FLEETS["llama3"].total * 24)


def test_a_hundred_thousand_gpus() -> None:
    plan = plan_cluster(100_000, STATE, 10.0)
    assert (plan.runs, plan.run_gpus, plan.ray_clusters, plan.kubernetes_clusters) == (6, 16_000, 7, 3)
    assert plan.series == 100_000 * 80 + 12_500 * 19 + 6 * 20
    assert plan.samples_per_s == pytest.approx(plan.series / 15)
    assert plan.shards == 6
    assert plan.shard_memory_bytes == pytest.approx(plan.series / 6 * 2392 * 1.25 * 2)
    assert plan.shard_disk_bytes == pytest.approx(plan.samples_per_s / 6 * (15 * 86_400 * 2 + 3 * 3600 * 6.5))
    assert plan.remote_write_senders == math.ceil(plan.samples_per_s / 6 * 0.1 / 2000)
    assert plan.storage_bytes == 6 * 4 * STATE
    assert (plan.head_cpus, plan.head_bytes) == (64, 256e9)


def test_series_are_those_that_the_monitoring_page_counts(root: Path) -> None:
    text = (root / "docs" / "monitoring.md").read_text()
    for row, figure in (
        ("node", limits.SERIES_PER_NODE),
        ("training run", limits.SERIES_PER_RUN),
        ("GPU[^|]*", limits.SERIES_PER_GPU),
    ):
        counted = re.search(rf"^\| {row} \| (?:about )?([\d,]+)[^|]* \|$", text, re.MULTILINE)
        assert counted and float(counted[1].replace(",", "")) == figure.value, row


def test_a_run_lies_in_one_kubernetes_cluster() -> None:
    """Two runs of 2,000 nodes and their heads fit into 5,000 nodes; a third would have to be split."""
    assert plan_cluster(1_000_000, STATE, 10.0).kubernetes_clusters == 31


def test_failures_are_those_of_the_failure_model() -> None:
    plan = plan_cluster(100_000, STATE, 10.0)
    alone = plan_failures(16_000, STATE, 10.0, plan.storage_bandwidth / 6, worksheet=Worksheet("a run"))
    assert plan.goodput == alone.goodput and plan.interval_s == alone.best.interval_s
    assert plan.failures.mtbf_s == pytest.approx(3600 / (16_000 * FLEETS["llama3"].total))


def test_saves_stall_training_as_long_as_allowed() -> None:
    """At Young's interval the stall takes the allowed share of the time, by construction; a small run is limited by its save."""
    plan = plan_cluster(16_000, STATE, 10.0, stored=Stored(stalled=0.02))
    storage = part(plan, "checkpoint storage")
    save = STATE / plan.storage_bandwidth
    assert USUAL.stall_share * save / math.sqrt(2 * USUAL.stall_share * save * plan.failures.mtbf_s) == pytest.approx(0.02)
    assert save < storage["young_s"]
    small = plan_cluster(8, STATE, 10.0, stored=Stored(most_save_s=120.0))
    assert STATE / small.storage_bandwidth == pytest.approx(120.0)
    # A large allowance is limited by one save at a time.
    many = plan_cluster(16_000, STATE, 10.0, stored=Stored(stalled=0.2, most_save_s=1e6))
    assert STATE / many.storage_bandwidth == pytest.approx(part(many, "checkpoint storage")["young_s"])


def test_a_given_bandwidth_is_shared_by_all_runs() -> None:
    fast, slow = (plan_cluster(100_000, STATE, 10.0, stored=Stored(bandwidth=rate)) for rate in (6e12, 6e10))
    assert fast.failures.save_s == pytest.approx(5.6) and slow.failures.save_s == pytest.approx(560)
    assert fast.goodput > slow.goodput


def test_shared_spares_are_fewer_than_those_of_each_run() -> None:
    plan = plan_cluster(96_000, STATE, 10.0)
    failures = part(plan, "failures of the fleet")
    assert plan.spares < failures["separate_spares"] == 6 * plan.failures.spares
    assert plan.nodes_to_add == plan.spares  # the runs use every node
    assert plan_cluster(100_000, STATE, 10.0).nodes_to_add == 0  # 500 nodes are beside the runs
    out = 96_000 * FLEETS["llama3"].hardware * 24
    assert failures["nodes_in_repair"] == pytest.approx(out)
    assert out < plan.spares < out + 4 * math.sqrt(out)


def test_scrapes_and_retention_scale_samples_and_disk() -> None:
    often = plan_cluster(1024, STATE, 10.0, watched=Watched(scrape_s=5, retention_days=15))
    longer = plan_cluster(1024, STATE, 10.0, watched=Watched(scrape_s=15, retention_days=30))
    usual = plan_cluster(1024, STATE, 10.0)
    assert often.samples_per_s == pytest.approx(3 * usual.samples_per_s)
    assert often.shard_disk_bytes == pytest.approx(3 * usual.shard_disk_bytes)
    assert often.shard_memory_bytes == usual.shard_memory_bytes
    blocks = usual.samples_per_s * 15 * 86_400 * 2
    assert longer.shard_disk_bytes - usual.shard_disk_bytes == pytest.approx(blocks)


def test_heads_grow_with_their_clusters() -> None:
    sizes = [plan_cluster(gpus, STATE, 10.0) for gpus in (8, 4000, 8000, 16_000)]
    assert [plan.head_cpus for plan in sizes] == [9, 22, 36, 64]
    assert [round(plan.head_bytes / 1e9) for plan in sizes] == [32, 88, 144, 256]


@pytest.mark.parametrize(
    ("gpus", "run", "cause"),
    [
        (0, None, "--gpus 0"),
        (1_000_001, None, "--gpus 1000001"),
        (100, 200, "exceeds --gpus 100"),
        (50_000, 16_001, "one Ray cluster"),
    ],
)
def test_impossible_fleets_are_refused(gpus: int, run: int | None, cause: str) -> None:
    with pytest.raises(UserError) as error:
        plan_cluster(gpus, STATE, 10.0, run)
    assert cause in error.value.cause and error.value.fix


def test_every_figure_has_a_formula_or_a_source() -> None:
    for _, worksheet in plan_cluster(100_000, STATE, 10.0).worksheet.walk():
        for line in worksheet.lines:
            assert (
                line.formula
                or line.why
                or line.name
                in {"gpus", "gpus_per_node", "scrape_s", "retention_s", "repair_s", "step_s"}
                | {
                    "dollars_per_gpu_hour",
                    "spares",
                }
            ), line
