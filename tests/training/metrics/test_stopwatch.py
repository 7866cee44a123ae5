from types import SimpleNamespace

import pytest
import torch

from strata.training.metrics import stopwatch
from strata.training.metrics.stopwatch import Stopwatch


def test_phases_of_a_step_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 2.0, 5.0, 6.0, 6.25, 9.0, 9.125])
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=clock.__next__))
    watch = Stopwatch(torch.device("cpu"))
    for phase in ("forward", "backward", "forward"):
        with watch.phase(phase):
            pass
    assert watch.read() == {"forward": 0.75, "backward": 3.0}
    with watch.phase("data"):
        pass
    assert watch.read() == {"data": 0.125}
    assert watch.read() == {}


class Event:
    """Stand-in for a CUDA event, whose time is the number of events recorded before it, squared, in milliseconds."""

    recorded: list["Event"]
    waited: list["Event"]

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "otherwise the event has no time"

    def record(self) -> None:
        self.at = float(len(Event.recorded) ** 2)
        Event.recorded.append(self)

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at

    def synchronize(self) -> None:
        Event.waited.append(self)


def test_phases_of_a_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are read once, after the last of them: at 0 to 1, 4 to 9 and 16 to 25 ms."""
    Event.recorded, Event.waited = [], []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda"))
    for phase in ("forward", "backward", "forward"):
        with watch.phase(phase):
            pass
    assert Event.waited == []
    assert watch.read() == pytest.approx({"forward": 0.010, "backward": 0.005})
    assert Event.waited == [Event.recorded[-1]]
    assert watch.read() == {} and len(Event.waited) == 1
