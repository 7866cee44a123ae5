"""Attribution of inter-token latency, from a server's histograms to the benchmark's table."""

import pytest

from strata.platform import metrics
from strata.serving.bench import itl_attribution, report
from strata.serving.bench.clients.calibration import Calibration
from strata.serving.bench.clients.load import Level, Target
from strata.serving.bench.clients.measure import Slo, summarise
from strata.serving.bench.clients.workloads import Workload
from strata.serving.bench.results import Measured, Ran, Results, Settings
from strata.serving.metrics.telemetry import Gateway, Replica

from .test_bench_results import record

FAST, SLOW = 0.0028, 0.0129  # within (0.0025, 0.003] and (0.012, 0.015]


def histograms(decode: Replica, gateway: Gateway) -> itl_attribution.Histograms:
    return itl_attribution.parse(decode.text() + gateway.text())


def load(decode: Replica, gateway: Gateway) -> None:
    decode.inter_token_latencies([FAST] * 980, "nothing")
    decode.inter_token_latencies([FAST] * 5 + [SLOW] * 15, "pool-prefill")
    gateway.inter_token_latencies([FAST] * 970 + [SLOW] * 30)


@pytest.fixture
def measured() -> itl_attribution.Histograms:
    decode, gateway = Replica("m", "decode", "decode-1"), Gateway("m", "gateway-1")
    load(decode, gateway)  # an earlier level
    before = histograms(decode, gateway)
    load(decode, gateway)
    return itl_attribution.between(before, histograms(decode, gateway))


def test_only_new_counts_are_attributed(measured: itl_attribution.Histograms) -> None:
    pool, nothing, total, gateway = itl_attribution.rows(measured)
    assert (nothing.beside, pool.beside, gateway.beside) == ("nothing", "pool-prefill", "on their way out")
    assert nothing.share == pytest.approx(0.98) and pool.share == pytest.approx(0.02)
    assert 0.0025 < nothing.p99 <= 0.003 and 0.012 < pool.p99 <= 0.015
    assert (nothing.of_longest, pool.of_longest) == (0.0, 1.0)
    assert total.share == gateway.share == 1 and 0.012 < total.p99 < gateway.p99 <= 0.015


def test_quantiles_are_those_of_prometheus() -> None:
    counts = [0] * (len(metrics.ITL_BUCKETS) + 1)
    assert itl_attribution.quantile([4, *counts[1:]], 0.5) == pytest.approx(metrics.ITL_BUCKETS[0] / 2)
    assert itl_attribution.quantile([*counts[:-1], 4], 0.5) == metrics.ITL_BUCKETS[-1]
    assert itl_attribution.above([4, *counts[1:]], metrics.ITL_BUCKETS[0] / 4) == pytest.approx(3)
    assert itl_attribution.above([*counts[:-1], 4], 1.0) == 4


def test_servers_without_histograms_or_restarted_have_no_rows(measured: itl_attribution.Histograms) -> None:
    assert itl_attribution.parse("vllm:x 1\n") == {} and list(itl_attribution.rows({})) == []
    assert itl_attribution.between({}, measured) == {}
    assert (
        itl_attribution.between({beside: [count + 1 for count in counts] for beside, counts in measured.items()}, measured) == {}
    )
    assert itl_attribution.read(Target("127.0.0.1", 9, "m")) == {}
    assert itl_attribution.merged([measured, {}]) == {}


def test_rounds_are_merged_and_shown(measured: itl_attribution.Histograms) -> None:
    level = Level(2, concurrency=1)
    settings = Settings(Workload("uniform", 50, 6, 4, 30, 0.25, 3), [level], 1, Slo(1, 1), 0, False, rounds=2)
    results = Results(Calibration(1, 1e6, 0.01, 0.01, 0.01))
    for number in range(2):
        one = Measured(level, summarise([record(0, 0.1, 0.01)], Slo(1, 1)), {}, [0.1], measured)
        results.add("strata", number, Ran(1.0, [one], None))
    [one] = results.ran["strata"].measured
    assert one.gaps["pool-prefill"] == [2 * count for count in measured["pool-prefill"]]
    table = report.itl_table(settings, results)
    assert list(table.columns[2].cells) == ["pool-prefill", "nothing", "engine total", "in the gateway"]
