from pathlib import Path

import psutil
import pytest

from strata.platform.hardware import machine


def test_lower_container_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.1)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert machine.available_memory() == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory() > 1_000_000
