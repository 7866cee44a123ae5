import re
import subprocess
import sys

from strata.platform import metrics
from strata.platform.metrics import Metric, ServeMetric

DECLARED = [value for value in vars(metrics).values() if isinstance(value, Metric)]
SPELLED_OUT = re.compile(r"_(ms|s|secs?|millis|kb|mb|gib|kib|mib|pct|percent)(_|$)")


def test_every_constant_is_in_a_group_and_names_are_unique() -> None:
    assert set(DECLARED) == set(metrics.EVERY)
    names = [metric.name for metric in metrics.EVERY]
    assert len(names) == len(set(names))


def test_names_follow_prometheus() -> None:
    for metric in DECLARED:
        assert re.fullmatch(r"strata_[a-z]+(_[a-z]+)+", metric.name), metric.name
        assert not SPELLED_OUT.search(metric.name), f"{metric.name}: base units, spelled out (seconds, bytes)"
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help and not metric.help.endswith("."), metric.name
        assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)


def test_ray_exports_training_metrics_and_the_endpoint_its_own() -> None:
    assert all(metric.exported == f"ray_{metric.name}" for metric in metrics.TRAINING)
    assert all(isinstance(metric, ServeMetric) and metric.exported == metric.name for metric in metrics.SERVING)


def test_series_have_the_label_run_or_model() -> None:
    assert all(metric.labels[0] == "run" for metric in metrics.TRAINING)
    assert all(metric.labels[0] == "model" for metric in metrics.SERVING)


def test_only_histograms_have_buckets_rising_and_in_seconds() -> None:
    for metric in metrics.SERVING:
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        if metric.buckets:
            assert metric.name.endswith("_seconds") and metric.buckets[0] <= 0.001, metric.name


def test_import_is_cheap() -> None:
    probe = "import sys, strata.platform.metrics; assert not {'ray', 'torch', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True)
