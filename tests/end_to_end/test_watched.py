"""All queries of dashboards and alerts return data from a real Prometheus that scraped a real run and a real endpoint."""

import re
from collections.abc import Iterator
from math import ceil
from typing import Any

import httpx
import pytest
from questions import ALERTS, NAMES, PANELS, RECORDS, RULES, series_of
from support import Served
from watching import Watch

from strata.dashboards import promql
from strata.dashboards.board import VARIABLES
from strata.platform import metrics
from strata.serving.api.requests import MAX_BODY_BYTES

# Series that are absent on one healthy machine without a GPU, with the reason. A series that is present must not be listed.
OPERATOR = "KubeRay's operator runs on Kubernetes only"
NO_EVENT = "exists from the first event on"
NO_NODE = "the autoscaler exports only states that some node is in"
NO_GPU = "Ray's agent exports only GPUs of this machine; those here are recordings of the two other exporters"
POD = "only pods have it"
ABSENT = {
    "kuberay_cluster_info": OPERATOR,
    "kuberay_cluster_condition_provisioned": OPERATOR,
    "kuberay_service_condition_ready": OPERATOR,
    "kuberay_job_deployment_status": OPERATOR,
    "kube_pod_container_status_restarts_total": POD,
    "kube_pod_container_status_terminated_reason": POD,
    "kube_pod_container_status_last_terminated_reason": POD,
    "ray_memory_manager_worker_eviction_total": NO_EVENT,
    "strata:ray_gpu:group": NO_GPU,
    "strata:ray_pods:group": POD,
    metrics.TRAIN_RESTARTS.exported: NO_EVENT,
    metrics.TRAIN_CHECKPOINT_FAILURES.exported: NO_EVENT,
    metrics.TRAIN_NOT_FINITE.exported: NO_EVENT,
    metrics.TRAIN_FAULTS.exported: NO_EVENT,
    metrics.TRAIN_RANK_SLOWNESS.exported: NO_EVENT,
    metrics.SERVE_RETRIES.exported: NO_EVENT,
    metrics.SERVE_DRAFTED.exported: "the endpoint does not speculate",
    metrics.SERVE_ACCEPTED.exported: "the endpoint does not speculate",
    metrics.SERVE_TIER_HIT.exported: "the endpoint has no tiers beyond the KV cache",
    "ray_cluster_pending_nodes": NO_NODE,
    "ray_cluster_failed_nodes": NO_NODE,
    "ray_node_gpus_utilization": NO_GPU,
    "ray_node_gram_used": NO_GPU,
    "ray_node_gram_available": NO_GPU,
    "ray_node_gpu_power_milliwatts": NO_GPU,
    "ray_node_gpu_temperature_celsius": NO_GPU,
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "the recorded DCGM has the older name, CLOCK_THROTTLE_REASONS",
}
ABSENT |= {name: "no picture model is served" for metric in metrics.SERVING_PICTURES for name in series_of(metric)}
TENANTS = [metric for metric in metrics.SERVING_GATEWAY if "tenant" in metric.labels]
ABSENT |= {name: "the endpoint has no keys" for metric in TENANTS for name in series_of(metric)}
# Queries that return nothing without these series.
EMPTY_PANELS = {
    *(f"strata-serving: {panel}" for panel in ("Pictures by outcome", "Step time", "Pictures running and waiting")),
    *(f"strata-serving: {panel}" for panel in ("Pictures per batch", "Picture steps")),
    *(f"strata-serving: {panel} by tenant" for panel in ("TTFT", "Requests", "Tokens", "Running requests")),
    *(f"strata-serving: {panel} by tenant" for panel in ("Queued requests", "Refusals")),
    "strata-serving: Adapter load time",
    *("strata-serving: Drafted and accepted tokens", "strata-serving: Draft acceptance by position"),
    "strata-serving: Prefix cache hit rate",  # its lines of the tiers
    *("strata-training: Faults by kind", "strata-training: Slow ranks"),
    "strata-cluster: KubeRay",
    "strata-cluster: Throttled now",  # by heat or hardware: no card of the recordings is
    "strata-oncall: annotation Restarts",
    "strata-training: annotation Restarts",
    "strata-teams: GPUs in use",
}
EMPTY_ALERTS = {
    *("StrataClusterNotProvisioned", "StrataServiceNotReady", "StrataJobFailed", "StrataClusterNotScraped"),  # operator
    *("StrataOperatorNotScraped", "StrataHeadRestarted", "StrataOutOfMemory"),  # pods
    *("StrataCheckpointFailing", "StrataLossNotFinite", "StrataRequestsRejected", "StrataTrainingFault"),  # events
    *("StrataGpuEccError", "StrataGpuRowRemapFailed", "StrataGpuNvlinkErrors"),  # events
    *("StrataGpuIdleWhileTraining", "StrataCollectiveHung"),  # no GPU of the recordings belongs to the run
}

WORKERS, REPLICAS, MOST_SERIES = 8, 4, 20_000


@pytest.fixture(scope="module")
def watch(prometheus: Watch, endpoint: Served) -> Iterator[Watch]:
    """Prometheus after requests of every kind and scrapes of their effects."""
    prometheus.scrape_endpoint(endpoint.url)
    prometheus.wait_for(metrics.SERVE_REPLICAS.exported)
    send_requests(endpoint)
    for moved in (
        f"rate({metrics.SERVE_INTER_TOKEN.exported}_count[1m]) > 0",
        f"rate({metrics.SERVE_KV_BYTES.exported}[1m]) > 0",
        f"rate({metrics.SERVE_PREFIX_QUERIED.exported}[1m]) > 0",
        "strata:serve_inter_token:slo_miss_ratio_rate6h",
        "strata:serve_errors:ratio_rate6h",
    ):
        prometheus.wait_for(moved)
    yield prometheus
    prometheus.stop()


def send_requests(endpoint: Served) -> None:
    with httpx.Client(base_url=endpoint.url, timeout=60) as client:

        def post(path: str, **body: Any) -> int:
            return client.post(path, json={"model": endpoint.model} | body).status_code

        generate = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True}
        for prompt in ("def ", "import os\n" * 40, "class Error", "import os\n" * 40):
            assert post("/v1/completions", prompt=prompt, **generate) == 200
        assert post("/v1/chat/completions", messages=[{"role": "user", "content": "class"}], **generate) == 200
        assert post("/v1/completions", prompt="def", max_tokens=-1) == 400
        assert client.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413


def test_every_panel_has_data(watch: Watch) -> None:
    empty = {f"{query.board}: {query.panel}": query.resolved() for query in PANELS if not watch.history(query.resolved())}
    print(f"{len(PANELS)} queries of panels")
    # Amounts of teams are added up at full five minutes of the clock, of which a short run may have seen none.
    amounts = {name for name, expr in empty.items() if f":{promql.STEP}]" in expr}
    assert empty.keys() - amounts == EMPTY_PANELS, empty


@pytest.mark.parametrize("name", sorted(VARIABLES.keys() - {"team"}))  # a team is a namespace of Kubernetes
def test_every_variable_has_values(watch: Watch, name: str) -> None:
    selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", VARIABLES[name]).groups()  # type: ignore[union-attr]
    assert watch.query(f"label/{label}/values", **{"match[]": re.sub(r"\$\w+", ".*", selector)})


def test_every_recording_rule_has_data(watch: Watch) -> None:
    empty = {name for name in RECORDS if not watch.history(name)}
    print(f"{len(RECORDS)} recording rules")
    assert empty == RECORDS.keys() & ABSENT.keys()


def without_threshold(expr: str) -> str:
    """The expression of an alert without its conditions, which returns data if every series exists and every join matches.

    Comparisons pass everything (`bool`), `unless` becomes `and`, and offsets are removed because the run was short."""
    expr = re.sub(r"\s(==|!=|<=|>=|<|>)\s", r" \1 bool ", expr)
    expr = re.sub(r"\bunless\b", "and", expr)
    return re.sub(r"\boffset \w+", "", expr)


def test_every_alert_has_its_series(watch: Watch) -> None:
    for expr in ALERTS.values():
        watch.history(expr)  # the unchanged expression is valid
    empty = {name: expr for name, expr in ALERTS.items() if not watch.history(without_threshold(expr))}
    print(f"{len(ALERTS)} alerts")
    assert empty.keys() == EMPTY_ALERTS, empty


def test_rules_are_evaluated_and_an_alert_fires(watch: Watch) -> None:
    rules = [rule for group in watch.query("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
    assert watch.history('ALERTS{alertname="StrataGpuXidError", alertstate="firing"}'), "the recorded XID"


def test_every_queried_or_declared_series_was_scraped(watch: Watch) -> None:
    there = watch.names()
    assert (NAMES | {name for metric in metrics.EVERY for name in series_of(metric)}) - there <= ABSENT.keys()
    assert not {name for name, why in ABSENT.items() if name in there and why not in (NO_EVENT, NO_GPU)}, (
        "present, so remove it from ABSENT"
    )


def test_number_of_series_is_bounded(watch: Watch, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts the series here, and extrapolates to a run and an endpoint with a node per worker, replica and head.

    Every worker and replica has a GPU, exported by both exporters. Only rank 0 has a run's series; the sum counts them for every
    worker, as after that many restarts."""

    def most(selector: str, by: str = "job") -> int:
        """The largest number of simultaneous series of one value of `by`."""
        return int(max(max(values) for values in watch.history(f"count by ({by}) ({{{selector}}})")))

    a_run = most('__name__=~"ray_strata_train_.*"', by="run")
    a_node = most('job="strata-ray", __name__!~"ray_strata_train_.*"', by="instance")
    a_gateway = most('role="gateway"', by="replica")
    an_engine = most('role=~"decode|prefill"', by="replica")
    a_gpu = ceil(max(most('job="strata-gpu"'), most('job="dcgm"')) / 2)
    recorded_of_a_gpu = ceil(most('__name__=~"strata:gpu[:_].*"') / 4)
    recorded = len([name for name in RECORDS if not name.startswith("strata:gpu")])
    alerts = 2 * len(ALERTS)  # ALERTS and ALERTS_FOR_STATE, per GPU
    itself = most('job="prometheus"')

    total = (
        (WORKERS + REPLICAS + 2) * a_node
        + WORKERS * a_run
        + REPLICAS * (a_gateway + an_engine)
        + (WORKERS + REPLICAS) * (2 * a_gpu + recorded_of_a_gpu + alerts)
        + recorded
        + itself
    )
    here = int(watch.query("status/tsdb")["headStats"]["numSeries"])
    with capsys.disabled():
        print(
            f"\nseries: a node {a_node}, a run {a_run}, a gateway {a_gateway}, an engine {an_engine}, "
            f"a GPU {a_gpu} and {recorded_of_a_gpu} recorded, other rules {recorded}, Prometheus {itself}; "
            f"in this session {here}; {WORKERS} workers and {REPLICAS} replicas {total}"
        )
    assert here < MOST_SERIES
    assert total < MOST_SERIES
