import re
import subprocess
import sys

from strata.platform import metrics
from strata.platform.metrics import Metric

DECLARED = [value for value in vars(metrics).values() if isinstance(value, Metric)]
SPELLED_OUT = re.compile(r"_(ms|s|secs?|millis|kb|mb|gib|kib|mib|pct|percent)(_|$)")


def test_every_constant_is_in_a_room_and_no_name_is_used_twice() -> None:
    assert set(DECLARED) == set(metrics.TRAINING)
    names = [metric.name for metric in metrics.TRAINING]
    assert len(names) == len(set(names))


def test_names_follow_prometheus() -> None:
    for metric in DECLARED:
        assert re.fullmatch(r"strata_[a-z]+(_[a-z]+)+", metric.name), metric.name
        assert not SPELLED_OUT.search(metric.name), f"{metric.name}: base units, spelled out (seconds, bytes)"
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help and not metric.help.endswith("."), metric.name
        assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)
        assert metric.exported == f"ray_{metric.name}"


def test_training_series_can_be_told_apart_by_run() -> None:
    assert all(metric.labels[0] == "run" for metric in metrics.TRAINING)


def test_names_cost_nothing_to_import() -> None:
    probe = "import sys, strata.platform.metrics; assert not {'ray', 'torch', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True)
