"""Every metric that a dashboard or rule reads is exported by some program, and every Strata metric is read.

tests/end_to_end/test_watched.py checks the queries against a real Prometheus. This file covers names that do not appear on a
single machine without a GPU, and test_expositions.py their labels."""

import re
from pathlib import Path

import pytest
import ray
from questions import NAMES, RECORDS, series_of

from strata.dashboards import series
from strata.platform import metrics

RAY = Path(ray.__file__).parent
# Programs that define Ray's metric names: the agent of each node, the GCS server and the raylet.
RAY_SOURCES = ("dashboard/modules/reporter/reporter_agent.py", "core/src/ray/gcs/gcs_server", "core/src/ray/raylet/raylet")
OURS = {name for metric in metrics.EVERY for name in series_of(metric)}
FOREIGN = NAMES - OURS - RECORDS.keys()
RAYS = {name for name in FOREIGN if name.startswith(metrics.RAY_PREFIX)}
DCGMS = {name for name in FOREIGN if name.startswith("DCGM_")}
RENAMED = {"DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"}  # new and old name; rules read both
# Metrics that the recording of a real H200 is older than.
AFTER_THE_RECORDING = (
    *(metrics.GPU_INFO, metrics.GPU_ECC_ERRORS, metrics.GPU_REMAPPED_ROWS, metrics.GPU_ROW_REMAP, metrics.GPU_NVLINK_ERRORS),
)


@pytest.fixture(scope="module")
def ray_words() -> set[str]:
    return {word.decode() for source in RAY_SOURCES for word in re.findall(rb"[a-z][a-z0-9_]{8,}", (RAY / source).read_bytes())}


def test_every_metric_is_read() -> None:
    assert not [metric.name for metric in metrics.EVERY if not series_of(metric) & NAMES]


def test_every_series_that_is_read_has_a_source() -> None:
    known = {foreign.exported for foreign in series.EVERY if foreign.source in ("kuberay", "alerts")}
    assert known <= FOREIGN - RAYS - DCGMS, "declared and not read"
    assert not {name for name in FOREIGN if "strata" in name}, "a Strata metric that no program exports"


@pytest.mark.slow
def test_ray_defines_the_names_that_are_read(ray_words: set[str]) -> None:
    assert RAYS
    names = {name.removeprefix(metrics.RAY_PREFIX) for name in RAYS}
    assert not {name for name in names if not {name, name.removesuffix("_total")} & ray_words}  # the agent adds the suffix


def test_unknown_ray_name_is_detected(ray_words: set[str]) -> None:
    assert "node_cpu_utilization" in ray_words and "node_cpu_utilisation" not in ray_words


def test_exporters_define_the_names_that_are_read(root: Path) -> None:
    recorded = root / "tests" / "monitoring" / "recorded"

    def names(file: str) -> set[str]:
        return set(re.findall(r"^(\w+)\{", (recorded / file).read_text(), re.MULTILINE))

    assert {RENAMED.get(name, name) for name in DCGMS} <= names("dcgm_exporter.txt")
    every = {metric.exported for metric in metrics.GPUS}
    assert names("gpu_exporter.txt") == every
    assert names("gpu_exporter_h200.txt") == every - {metric.exported for metric in AFTER_THE_RECORDING}
