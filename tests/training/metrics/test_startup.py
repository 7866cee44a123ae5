import os
import time
from types import SimpleNamespace

import psutil
import pytest

from strata.training.metrics import startup
from strata.training.metrics.startup import Startup


def test_phases_follow_each_other() -> None:
    start = Startup(began=100.0)
    for phase, at in (("imports", 101.5), ("corpus", 105.0), ("workers", 113.25)):
        start.done(phase, at)
    assert start.phases == pytest.approx({"imports": 1.5, "corpus": 3.5, "workers": 8.25})


def test_known_phases_are_continued_and_not_changed() -> None:
    """A command that replaces its process passes its phases on."""
    known = {"imports": 1.5}
    start = Startup(100.0, known)
    start.done("corpus", 105.0)
    assert start.phases == pytest.approx({"imports": 1.5, "corpus": 3.5}) and known == {"imports": 1.5}


def test_startup_begins_with_the_process_and_a_phase_ends_now() -> None:
    start = Startup()
    assert start.began == psutil.Process(os.getpid()).create_time()
    start.done("imports")
    assert start.phases["imports"] == pytest.approx(time.time() - start.began, abs=1)


def process(user: float, system: float, alive: bool = True) -> SimpleNamespace:
    def cpu_times() -> SimpleNamespace:
        if not alive:
            raise psutil.NoSuchProcess(1)
        return SimpleNamespace(user=user, system=system)

    return SimpleNamespace(cpu_times=cpu_times)


def test_line_has_the_phases_and_the_time_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 + 2 seconds of the process, 30 + 10 of a child and 200 of its child; a third has ended."""
    family = [process(30, 10), process(200, 0), process(5000, 0, alive=False)]

    def children(recursive: bool) -> list[SimpleNamespace]:
        return family if recursive else family[:1]

    own = SimpleNamespace(children=children, **vars(process(5, 2)))
    monkeypatch.setattr(startup.psutil, "Process", lambda: own)
    line = Startup(100.0, {"imports": 1.5, "corpus": 3.52}).line()
    assert line == "first step after 5.0 s (imports 1.5 · corpus 3.5), 247 s of processor time"
