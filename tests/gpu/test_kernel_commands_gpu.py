"""Kernel benchmark and tuning on a GPU, each for an operation that compiles fast."""

import json
from pathlib import Path

import pytest
import torch

from strata.kernels.bench.case import OURS
from strata.kernels.commands import bench_kernels, kernels_tune
from strata.kernels.tuning import tunable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_benchmark_times_strata_and_peers_under_the_ceilings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_kernels(["swiglu"], quick=True, json=tmp_path / "kernels.json", plot=None)
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found["machine"]["gpu"] == torch.cuda.get_device_name() and found["machine"]["gpus"]
    for case in found["cases"]:
        ours = case["contenders"][OURS]
        assert ours["trouble"] is None and len(ours["rounds_ms"]) == 3 and ours["extra_bytes"] is not None
        assert 0.2 < ours["of_ceiling"] < 1.15  # a copy does not quite reach the memory bandwidth
        assert case["contenders"]["torch eager"]["ms"] > 0
    assert set(found["host_microseconds"]) >= {"swiglu", "(an empty Triton kernel)", "(torch.add)"}
    assert all(1 < microseconds < 2000 for microseconds in found["host_microseconds"].values())
    assert (tmp_path / "kernels.png").is_file() and "ceilings of this run" in capsys.readouterr().out


def test_tuning_writes_a_table_that_launches_use(capsys: pytest.CaptureFixture[str]) -> None:
    arch = tunable.architecture(torch.device("cuda"))
    kernels_tune(["swiglu"])
    table = tunable.read(tunable.measured_path(arch))
    assert table and all(line.startswith("swiglu") for line in table)
    assert tunable.measured(arch) == table  # the cached table was invalidated
    assert "best ms" in capsys.readouterr().out
