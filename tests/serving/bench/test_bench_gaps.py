"""Where gaps come from, from a server's histograms to the benchmark's table."""

import pytest

from strata.platform import metrics
from strata.serving.bench import gaps, report
from strata.serving.bench.clients.calibration import Calibration
from strata.serving.bench.clients.load import Level, Target
from strata.serving.bench.clients.measure import Slo, summarise
from strata.serving.bench.clients.workloads import Workload
from strata.serving.bench.results import Measured, Ran, Results, Settings
from strata.serving.metrics.telemetry import Gateway, Replica

from .test_bench_results import record

FAST, SLOW = 0.0028, 0.0129  # within (0.0025, 0.003] and (0.012, 0.015]


def told(decode: Replica, gateway: Gateway) -> gaps.Gaps:
    return gaps.parse(decode.text() + gateway.text())


def load(decode: Replica, gateway: Gateway) -> None:
    decode.streams_went_on([FAST] * 980, "nothing")
    decode.streams_went_on([FAST] * 5 + [SLOW] * 15, "pool-prefill")
    gateway.tokens_came([FAST] * 970 + [SLOW] * 30)


@pytest.fixture
def measured() -> gaps.Gaps:
    decode, gateway = Replica("m", "decode", "decode-1"), Gateway("m", "gateway-1")
    load(decode, gateway)  # of a level before
    before = told(decode, gateway)
    load(decode, gateway)
    return gaps.between(before, told(decode, gateway))


def test_only_what_is_new_counts_and_its_cause_is_seen(measured: gaps.Gaps) -> None:
    pool, nothing, everything, out = gaps.rows(measured)
    assert (nothing.beside, pool.beside, out.beside) == ("nothing", "pool-prefill", "on their way out")
    assert nothing.share == pytest.approx(0.98) and pool.share == pytest.approx(0.02)
    assert 0.0025 < nothing.p99 <= 0.003 and 0.012 < pool.p99 <= 0.015
    assert (nothing.of_longest, pool.of_longest) == (0.0, 1.0)
    assert everything.share == out.share == 1 and 0.012 < everything.p99 < out.p99 <= 0.015


def test_quantiles_are_prometheus() -> None:
    counts = [0] * (len(metrics.ITL_BUCKETS) + 1)
    assert gaps.quantile([4, *counts[1:]], 0.5) == pytest.approx(metrics.ITL_BUCKETS[0] / 2)
    assert gaps.quantile([*counts[:-1], 4], 0.5) == metrics.ITL_BUCKETS[-1]
    assert gaps.above([4, *counts[1:]], metrics.ITL_BUCKETS[0] / 4) == pytest.approx(3)
    assert gaps.above([*counts[:-1], 4], 1.0) == 4


def test_servers_without_histograms_or_begun_anew_say_nothing(measured: gaps.Gaps) -> None:
    assert gaps.parse("vllm:x 1\n") == {} and list(gaps.rows({})) == []
    assert gaps.between({}, measured) == {}
    assert gaps.between({beside: [count + 1 for count in counts] for beside, counts in measured.items()}, measured) == {}
    assert gaps.read(Target("127.0.0.1", 9, "m")) == {}
    assert gaps.together([measured, {}]) == {}


def test_rounds_are_counted_together_and_shown(measured: gaps.Gaps) -> None:
    level = Level(2, concurrency=1)
    settings = Settings(Workload("uniform", 50, 6, 4, 30, 0.25, 3), [level], 1, Slo(1, 1), 0, False, rounds=2)
    results = Results(Calibration(1, 1e6, 0.01, 0.01, 0.01))
    for _ in range(2):
        results.add(
            "strata", Ran(1.0, [Measured(level, summarise([record(0, 0.1, 0.01)], Slo(1, 1)), {}, [0.1], measured)], None)
        )
    [one] = results.ran["strata"].measured
    assert one.gaps["pool-prefill"] == [2 * count for count in measured["pool-prefill"]]
    table = report.gap_table(settings, results)
    assert list(table.columns[2].cells) == ["pool-prefill", "nothing", "all of them", "on their way out"]
