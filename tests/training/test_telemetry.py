import pytest

from strata.platform import metrics
from strata.training.records import Record
from strata.training.telemetry import Telemetry

PLAIN = Record(step=3, loss=2.5, lr=0.1, grad_norm=None, tokens_per_s=10.0, time=0.0)
FULL: Record = {
    **PLAIN,
    "grad_norm": 0.7,
    "val_loss": 2.6,
    "mfu": 0.4,
    "peak_memory_bytes": 1000,
    "seconds": {"forward": 0.2, "backward": 0.4},
    "checkpoint_stall_s": 0.05,
    "checkpoint_s": 1.5,
}


class Exported:
    """In place of Ray's Gauge and Counter: the values of every series by name and labels, as Prometheus would show them."""

    values: dict[tuple[str, ...], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._name, self._keys, self._tags = name, tag_keys, dict[str, str]()

    def set_default_tags(self, tags: dict[str, str]) -> "Exported":
        self._tags = tags
        return self

    def _series(self, tags: dict[str, str] | None) -> tuple[str, ...]:
        labels = self._tags | (tags or {})
        assert set(labels) == set(self._keys), "Ray refuses a value whose labels are not all there"
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


def test_every_training_metric_reaches_prometheus(exported: dict[tuple[str, ...], float]) -> None:
    telemetry = Telemetry("mine", tokens_per_step=512, restarts=2)
    telemetry.record(FULL)
    telemetry.record(FULL)
    telemetry.saved(3, 4096)
    assert {series[0] for series in exported} == {metric.name for metric in metrics.TRAINING}
    assert all(series[1] == "mine" for series in exported)
    assert exported["strata_train_tokens_total", "mine"] == 1024
    assert exported["strata_train_restarts_total", "mine"] == 2
    assert exported["strata_train_validation_loss", "mine"] == 2.6
    assert exported["strata_train_step_seconds", "mine", "backward"] == 0.4
    assert exported["strata_train_checkpoint_step", "mine"] == 3


def test_what_is_not_known_is_not_exported(exported: dict[tuple[str, ...], float]) -> None:
    Telemetry("mine", tokens_per_step=512).record(PLAIN)
    assert {series[0] for series in exported} == {
        "strata_train_step",
        "strata_train_loss",
        "strata_train_learning_rate",
        "strata_train_tokens_per_second",
        "strata_train_tokens_total",
    }


def test_rays_own_metrics_take_it_without_a_cluster(capfd: pytest.CaptureFixture[str]) -> None:
    import ray

    assert not ray.is_initialized()
    telemetry = Telemetry("mine", tokens_per_step=512, restarts=1)
    telemetry.record(FULL)
    telemetry.saved(3, 4096)
    assert capfd.readouterr() == ("", "")
