"""Medians over rounds, doubts about the clients, and ITL quantiles from histograms, in worked numbers."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from strata.platform import metrics
from strata.serving.bench import compare, itl_attribution, report
from strata.serving.bench.clients.calibration import Calibration
from strata.serving.bench.clients.load import Level, Target
from strata.serving.bench.clients.measure import Slo, Summary
from strata.serving.bench.clients.workloads import Workload
from strata.serving.bench.itl_attribution import Row, above, between, merged, quantile, rows
from strata.serving.bench.results import Measured, Ran, Results, Settings

# 4 clients can read 1000 events a second together.
CALIBRATION = Calibration(clients=4, events_per_s=1000.0, pace_s=0.01, itl_p50=0.0101, itl_p99=0.0123)
ONE, TWO = Level(8, concurrency=1), Level(8, concurrency=2)
SUMMARY = Summary(1, 0, None, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

SETTINGS = Settings(Workload("uniform", 50, 6, 4, 30, 0.25, 3), [ONE], 1, Slo(1, 1), 0, False, rounds=4)


def measured(level: Level = ONE, events_per_s: float = 1.0, cpu: tuple[float, ...] = (0.1,), **more: Any) -> Measured:
    return Measured(level, replace(SUMMARY, events_per_s=events_per_s), more.pop("kinds", {}), list(cpu), **more)


@pytest.mark.parametrize(
    ("events_per_s", "cpu", "doubts"),
    [
        # Two clients can read 500 events a second.
        (250.0, (0.1, 0.5), None),
        (251.0, (0.1, 0.2), "50% of the clients' capacity"),
        (400.0, (0.9, 0.2), "80% of the clients' capacity"),
        (250.0, (0.1, 0.51), "a client used 51% of a core"),
        (100.0, (0.8, 0.1), "a client used 80% of a core"),
        (300.0, (0.1, 0.1, 0.1), None),
    ],
)
def test_clients_above_half_of_their_capacity_may_be_the_bottleneck(
    events_per_s: float, cpu: tuple[float, ...], doubts: str | None
) -> None:
    assert measured(events_per_s=events_per_s, cpu=cpu).doubts(CALIBRATION) == doubts


def test_results_are_medians_of_the_rounds() -> None:
    results = Results(CALIBRATION)
    kind = {"long": replace(SUMMARY, ttft_p50=7.0)}
    results.add("strata", 0, Ran(9.0, [measured(ONE, 10.0, (0.9, 0.1), kinds=kind, gaps={"nothing": [1, 2]})], {"round": 1}))
    results.add("strata", 1, Ran(3.0, [measured(ONE, 30.0, (0.5, 0.6), gaps={"nothing": [3, 5]}, kinds=kind)], {"round": 2}))
    results.add("strata", 2, Ran(5.0, [measured(ONE, 80.0, (0.2, 0.7), gaps={"nothing": [4, 6]}, kinds=kind)], {"round": 3}))
    ran = results.ran["strata"]
    assert (ran.start_s, ran.cross_check) == (5.0, {"round": 3})
    [one] = ran.measured
    assert one.summary.events_per_s == 30.0 and one.summary.requests == 3
    assert one.client_cpu == [0.9, 0.1], "those of the round with the busiest client"
    assert one.gaps == {"nothing": [8, 13]}
    assert one.kinds["long"].ttft_p50 == 7.0 and len(results.rounds["strata"]) == 3


def test_ratios_compare_what_one_round_measured() -> None:
    """The machine is half as fast in the second round, and bare vLLM failed to start in the last one."""
    results = Results(CALIBRATION)
    for name, speeds in (("vllm", (100.0, 50.0, 110.0)), ("strata", (120.0, 70.0, 99.0, 500.0))):
        for number, speed in enumerate(speeds):
            summary = replace(SUMMARY, tokens_per_s=speed, itl_p99=None if number else 2.0)
            results.add(name, number, Ran(1.0, [Measured(ONE, summary, {"long": summary}, [0.1])], None))
    assert [one.summary.tokens_per_s for one, _ in results.pairs("strata", "vllm", ONE)] == [120.0, 70.0, 99.0]
    found = report.ratios(results, "strata", ONE)
    assert found["long"] == found[""] and found[""]["itl_p99"] == [1.0]
    assert found[""]["tokens_per_s"] == pytest.approx([1.2, 1.4, 0.9])
    assert report.ratios(results, "strata", TWO) == report.ratios(results, "ray", ONE) == {}
    cells = [next(iter(column.cells)) for column in report.ratio_table(SETTINGS, results).columns]
    assert cells == ["concurrency 1", "strata", "1.20 (0.90-1.40)", *["1.00 (1.00-1.00)"] * 2, "1.00"]


def test_an_interrupted_round_has_fewer_levels() -> None:
    results = Results(CALIBRATION)
    results.add("strata", 0, Ran(1.0, [measured(ONE, 10.0)], None))
    results.add("strata", 1, Ran(2.0, [measured(ONE, 20.0), measured(TWO, 50.0)], None))
    first, second = results.ran["strata"].measured
    assert (first.level, first.summary.events_per_s) == (ONE, 15.0)
    assert (second.level, second.summary.events_per_s) == (TWO, 50.0)
    assert results.at("strata", TWO) is second
    assert results.at("strata", Level(9, concurrency=2)) is None and results.at("other", ONE) is None


def test_calibration_is_printed_in_milliseconds() -> None:
    assert compare._calibrated(CALIBRATION) == (
        "4 client processes: capacity 1,000 events/s, measure ITL p50 10.10, p99 12.30 ms at a pace of 10 ms"
    )


BOUNDS = (0.5, 1.0, 2.0, 5.0, 10.0)  # seconds


@pytest.fixture
def five_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ITL_BUCKETS", BOUNDS)


@pytest.mark.usefixtures("five_buckets")
@pytest.mark.parametrize(
    ("counts", "q", "value"),
    [
        ([4, 0, 0, 0, 0, 0], 0.5, 0.25),
        ([4, 0, 0, 0, 0, 0], 1.0, 0.5),
        ([2, 0, 4, 0, 0, 0], 0.5, 1.25),  # the third of six: a quarter into 1 to 2 s
        ([2, 0, 4, 0, 0, 0], 2 / 6, 0.5),
        ([1, 3, 0, 6, 0, 0], 0.7, 3.5),  # the seventh of ten: three of six into 2 to 5 s
        ([0, 0, 0, 0, 8, 0], 0.25, 6.25),
        ([0, 0, 0, 0, 1, 9], 0.5, 10.0),  # beyond the last bound
        ([0, 0, 0, 0, 0, 0], 0.5, 10.0),
    ],
)
def test_quantiles_are_interpolated_within_a_bucket(counts: list[int], q: float, value: float) -> None:
    assert quantile(counts, q) == pytest.approx(value)


@pytest.mark.usefixtures("five_buckets")
@pytest.mark.parametrize(
    ("limit", "count"),
    [
        (0.0, 21.0),
        (0.125, 20.25),  # three quarters of the first bucket, and all others
        (0.5, 18.0),
        (1.0, 18.0),
        (1.75, 15.0),  # a quarter of the 4 between 1 and 2 s: 1 + 0 + 6 + 8
        (2.0, 14.0),
        (7.5, 11.0),  # half of the 6, and 8
        (10.0, 8.0),
        (99.0, 8.0),
    ],
)
def test_values_above_a_limit_are_interpolated(limit: float, count: float) -> None:
    assert above([3, 0, 4, 0, 6, 8], limit) == pytest.approx(count)


@pytest.mark.usefixtures("five_buckets")
def test_rows_attribute_the_slowest_hundredth() -> None:
    histograms = {
        "nothing": [300, 0, 0, 0, 0, 0],
        "prefill": [90, 0, 0, 2, 0, 0],
        "pool-prefill": [0, 0, 0, 6, 2, 0],
        "hand-over": [0] * 6,
        "on their way out": [0, 100, 0, 0, 0, 0],
        "another server's": [5] * 6,
    }
    # 400 in all. The slowest 4 are those beyond the 396th, the sixth of eight in 2 to 5 s: 2 + 3 * 6 / 8 = 4.25 s.
    # Above it: a quarter of 2 = 0.5 beside prefill; a quarter of 6, and 2 = 3.5 beside pool-prefill.
    found = list(rows(histograms))
    assert found == [
        Row("prefill", 0.23, pytest.approx(46 / 90 / 2), pytest.approx(2 + 3 * (91.08 - 90) / 2), pytest.approx(0.125)),
        Row("pool-prefill", 0.02, pytest.approx(4.0), pytest.approx(5 + 5 * (7.92 - 6) / 2), pytest.approx(0.875)),
        Row("nothing", 0.75, pytest.approx(0.25), pytest.approx(0.495), 0.0),
        Row("engine total", 1.0, pytest.approx(200 / 390 / 2), pytest.approx(4.25), None),
        Row("on their way out", 0.25, pytest.approx(0.75), pytest.approx(0.995), None),
    ]


@pytest.mark.usefixtures("five_buckets")
def test_without_engine_histograms_there_are_no_rows() -> None:
    assert list(rows({"on their way out": [1] * 6, "nothing": [0] * 6})) == []
    [only, total] = rows({"nothing": [0, 0, 0, 0, 0, 3]})
    assert only == Row("nothing", 1.0, 10.0, 10.0, 1.0) and total.beside == "engine total"


def test_difference_of_two_readings() -> None:
    before, after = {"a": [1, 2], "b": [0, 0]}, {"a": [4, 2], "b": [5, 7], "c": [1, 1]}
    assert between(before, after) == {"a": [3, 0], "b": [5, 7]}
    assert between(before, {"a": [4, 1], "b": [5, 7]}) == {}, "a process has restarted"


def test_histograms_of_all_rounds_are_summed() -> None:
    assert merged([{"a": [1, 2], "b": [1, 1]}, {"a": [10, 20]}]) == {"a": [11, 22]}
    assert merged([]) == {}


TEXT = """# TYPE strata_serve_engine_gap_seconds histogram
strata_serve_engine_gap_seconds_bucket{beside="nothing",replica="a",le="0.5"} 3
strata_serve_engine_gap_seconds_bucket{beside="nothing",replica="a",le="+Inf"} 10
strata_serve_engine_gap_seconds_bucket{beside="nothing",replica="a",le="1.0"} 7
strata_serve_engine_gap_seconds_bucket{beside="nothing",replica="b",le="0.5"} 1
strata_serve_engine_gap_seconds_bucket{beside="nothing",replica="b",le="1.0"} 1
strata_serve_engine_gap_seconds_bucket{beside="nothing",replica="b",le="+Inf"} 3
strata_serve_engine_gap_seconds_sum{beside="nothing",replica="b"} 40
# TYPE strata_serve_inter_token_seconds histogram
strata_serve_inter_token_seconds_bucket{le="0.5"} 2
strata_serve_inter_token_seconds_bucket{le="+Inf"} 5
# TYPE other histogram
other_bucket{beside="nothing",le="0.5"} 100
"""
PARSED = {"nothing": [4, 4, 5], "on their way out": [2, 3]}


def test_histograms_of_all_replicas_are_parsed() -> None:
    assert itl_attribution.parse(TEXT) == PARSED


@pytest.mark.parametrize(("status", "found"), [(200, PARSED), (404, {}), (None, {})])
def test_servers_without_metrics_have_no_histograms(
    monkeypatch: pytest.MonkeyPatch, status: int | None, found: dict[str, list[int]]
) -> None:
    def get(url: str, headers: dict[str, str], timeout: float) -> httpx.Response:
        assert url == "http://host:81/metrics"
        if status is None:
            raise httpx.ConnectError("no")
        return httpx.Response(status, text=TEXT)

    monkeypatch.setattr(httpx, "get", get)
    assert itl_attribution.read(Target("host", 81, "m")) == found
