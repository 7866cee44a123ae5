import threading
import time

import pytest

from strata.platform import metrics
from strata.training.metrics import telemetry as module
from strata.training.metrics.records import Record
from strata.training.metrics.telemetry import Telemetry, checkpoint_failures, rank_seconds

PLAIN = Record(step=3, loss=2.5, lr=0.1, grad_norm=None, tokens_per_s=10.0, time=0.0)
FULL: Record = {
    **PLAIN,
    "grad_norm": 0.7,
    "val_loss": 2.6,
    "mfu": 0.4,
    "workers": 2,
    "peak_memory_bytes": 1000,
    "seconds": {"forward": 0.2, "backward": 0.4},
    "checkpoint_stall_s": 0.05,
    "checkpoint_s": 1.5,
}


class Exported:
    """Stand-in for Ray's Gauge and Counter. Stores the value of every series by name and labels."""

    values: dict[tuple[str, ...], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._name, self._keys, self._tags = name, tag_keys, dict[str, str]()

    def set_default_tags(self, tags: dict[str, str]) -> "Exported":
        self._tags = tags
        return self

    def _series(self, tags: dict[str, str] | None) -> tuple[str, ...]:
        labels = self._tags | (tags or {})
        assert set(labels) == set(self._keys), "Ray refuses a value with missing labels"
        return (self._name, *(labels[key] for key in self._keys))

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.values[self._series(tags)] = value

    def inc(self, value: float) -> None:
        assert value > 0
        self.values[self._series(None)] = self.values.get(self._series(None), 0) + value


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], float]:
    Exported.values = {}
    monkeypatch.setattr("ray.util.metrics.Gauge", Exported)
    monkeypatch.setattr("ray.util.metrics.Counter", Exported)
    return Exported.values


def repeating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_every_training_metric_reaches_prometheus(exported: dict[tuple[str, ...], float]) -> None:
    telemetry = Telemetry("mine", steps=100, tokens_per_step=512, restarts=2)
    telemetry.record(FULL)
    telemetry.record(FULL)
    telemetry.saved(3, 4096, at=1e9)
    telemetry.not_finite()
    checkpoint_failures("mine")()
    rank_seconds("mine", rank=7, stage=1)(FULL)
    assert {series[0] for series in exported} == {metric.name for metric in metrics.TRAINING} - {
        metric.name for metric in module.OF_THE_DRIVER
    }
    assert all(series[1] == "mine" for series in exported)
    assert exported["strata_train_steps_planned", "mine"] == 100
    assert exported["strata_train_tokens_total", "mine"] == 1024
    assert exported["strata_train_restarts_total", "mine"] == 2
    assert exported["strata_train_checkpoint_failures_total", "mine"] == 1
    assert exported["strata_train_validation_loss", "mine"] == 2.6
    assert exported["strata_train_step_seconds", "mine", "backward"] == 0.4
    assert exported["strata_train_checkpoint_step", "mine"] == 3
    assert exported["strata_train_checkpoint_timestamp_seconds", "mine"] == 1e9
    assert exported["strata_train_checkpoint_bytes", "mine"] == 4096
    assert exported["strata_train_not_finite_total", "mine"] == 1


def test_a_rank_exports_its_time_before_the_gradients_are_exchanged(exported: dict[tuple[str, ...], float]) -> None:
    seconds = {"data": 0.5, "forward": 0.2, "backward": 0.4, "optimizer": 8.0, "checkpoint": 16.0}
    rank_seconds("mine", rank=7, stage=1)({**PLAIN, "seconds": seconds})
    rank_seconds("mine", rank=8, stage=1)({**PLAIN, "seconds": {"forward": 0.3}})
    assert exported == {
        ("strata_train_rank_seconds", "mine", "7", "1"): pytest.approx(0.7),
        ("strata_train_rank_seconds", "mine", "8", "1"): pytest.approx(0.3),
    }


def test_unknown_values_are_not_exported(exported: dict[tuple[str, ...], float]) -> None:
    Telemetry("mine", steps=100, tokens_per_step=512).record(PLAIN)
    assert {series[0] for series in exported} == {
        "strata_train_step",
        "strata_train_steps_planned",
        "strata_train_loss",
        "strata_train_learning_rate",
        "strata_train_tokens_per_second",
        "strata_train_tokens_total",
        "strata_train_checkpoint_timestamp_seconds",
    }
    assert exported["strata_train_checkpoint_timestamp_seconds", "mine"] == pytest.approx(time.time(), abs=5)


def test_missing_phase_is_exported_as_zero(exported: dict[tuple[str, ...], float]) -> None:
    telemetry = Telemetry("mine", steps=100, tokens_per_step=512)
    telemetry.record({**PLAIN, "seconds": {"forward": 0.2, "checkpoint": 3.0}})
    assert exported["strata_train_step_seconds", "mine", "checkpoint"] == 3.0
    telemetry.record({**PLAIN, "seconds": {"forward": 0.3}})
    assert exported["strata_train_step_seconds", "mine", "checkpoint"] == 0.0
    assert exported["strata_train_step_seconds", "mine", "forward"] == 0.3


def test_gauges_of_a_hanging_run_are_repeated(exported: dict[tuple[str, ...], float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEAT_S", 0.01)
    with Telemetry("mine", steps=100, tokens_per_step=512, restarts=1) as telemetry:
        telemetry.record(FULL)
        before = dict(exported)
        exported.clear()  # as Ray drops gauges that are not set again
        [repeats] = repeating()
        assert repeats.daemon, "it must not keep a worker alive"
        deadline = time.monotonic() + 5
        while len(exported) < len(before) - 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        counted = {series for series in before if series[0].endswith("_total")}
        assert exported == {series: value for series, value in before.items() if series not in counted}
        telemetry.record({**FULL, "loss": 2.0})
        time.sleep(0.05)
        assert exported["strata_train_loss", "mine"] == 2.0, "an old value must not overwrite a new one"
    repeats.join(5)
    assert not repeats.is_alive()


def test_metrics_are_silent_without_a_cluster(capfd: pytest.CaptureFixture[str]) -> None:
    import ray

    assert not ray.is_initialized()
    telemetry = Telemetry("mine", steps=100, tokens_per_step=512, restarts=1)
    telemetry.record(FULL)
    telemetry.saved(3, 4096, at=1e9)
    checkpoint_failures("mine")()
    assert capfd.readouterr() == ("", "")


def test_gauges_are_repeated_every_five_seconds(exported: dict[tuple[str, ...], float]) -> None:
    """Ray exports every 10 seconds. The thread ends with the worker."""
    waits, answers = list[float](), iter([False, False, True])

    class Ended:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            exported.clear()
            return next(answers)

    telemetry = Telemetry("mine", steps=100, tokens_per_step=512)
    telemetry.record({**PLAIN, "seconds": {"forward": 0.2}})
    telemetry._ended = Ended()  # type: ignore[assignment]
    telemetry._repeat()
    assert waits == [5.0, 5.0, 5.0] and exported == {}
    answers = iter([False, True])
    Ended.wait = lambda self, _: next(answers)  # type: ignore[method-assign]
    telemetry._repeat()
    assert exported["strata_train_loss", "mine"] == 2.5
    assert exported["strata_train_step_seconds", "mine", "forward"] == 0.2
