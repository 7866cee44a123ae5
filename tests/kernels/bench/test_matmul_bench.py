"""`strata bench matmul`: steps that fail, hang or are wrong are reported, and the others are measured."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from strata.kernels.bench.ceilings import Ceilings
from strata.kernels.bench.matmul import run
from strata.kernels.bench.matmul.probe import probe
from strata.kernels.commands import bench_matmul
from strata.kernels.ladder.steps import STEPS, Step
from strata.platform.errors import UserError

CPU = torch.device("cpu")
STUB = """
import sys, time
step, *shapes = sys.argv[1:]
assert shapes == ["1,2,3", "4,5,6"], shapes
if step == "slow":
    time.sleep(60)
if step == "raising":
    print("a warning", file=sys.stderr)
    raise RuntimeError("no such instruction")
if step == "dying":
    import os
    os._exit(7)
"""


def test_a_step_that_fails_or_hangs_takes_only_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = probe(["fine", "slow", "raising", "dying"], [(1, 2, 3), (4, 5, 6)], module="stub", longest=2)
    assert found == {
        "slow": "not finished after 2 s",
        "raising": "RuntimeError: no such instruction",
        "dying": "the process ended with 7",
    }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that torch computes on the CPU, except for one that fails in its process, one that raises and three wrong ones."""

    def prepared(step: Step, a: Tensor, b: Tensor, out: Tensor) -> Callable[[], None]:
        def multiply() -> None:
            if step.name == "dot":
                raise RuntimeError("out of\nresources")
            torch.mm(a, b, out=out)
            if step.name == "coalesced":
                out[-1, -1] = math.nan
            elif step.name == "shared_tiles":
                out.mul_(1.01)

        return (lambda: None) if step.name == "pipelined" else multiply  # which writes nothing

    monkeypatch.setattr(run, "prepared", prepared)
    monkeypatch.setattr(run, "probe", lambda steps, shapes: {"naive": "not finished after 75 s"})
    monkeypatch.setattr(run.ceilings, "measure", lambda device, budget: Ceilings(1e9, 1e9))
    monkeypatch.setattr(run, "SHAPES", ((64, 48, 32), (40, 24, 16)))
    monkeypatch.setattr(run, "SETTINGS", run.Settings(rounds=2, budget=0.1, fewest=1))


def test_failures_are_in_the_json_beside_the_measured_steps(
    fake: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "matmul.json"
    bad = ["naive", "coalesced", "shared_tiles", "dot", "pipelined"]
    assert run.bench([], path, CPU) == bad
    record = json.loads(path.read_text())
    assert record["benchmark"] == "matmul" and record["copy_bytes_per_s"] > 0
    assert [(case["rows"], case["columns"], case["inner"]) for case in record["cases"]] == [(64, 48, 32), (40, 24, 16)]
    for case in record["cases"]:
        steps = case["steps"]
        assert list(steps) == [*(step.name for step in STEPS), "cuBLAS"]
        assert case["flops"] == 2 * case["rows"] * case["columns"] * case["inner"]
        assert steps["naive"]["trouble"] == "not finished after 75 s"
        assert steps["dot"]["trouble"] == "RuntimeError: out of"
        for wrong in ("coalesced", "shared_tiles", "pipelined"):
            assert steps[wrong]["trouble"].startswith("wrong"), wrong
        for name, one in steps.items():
            assert (one["ms"] is None) == (name in bad) == bool(one["trouble"]), name
            if one["ms"] is not None:
                assert len(one["rounds_ms"]) == 2
                assert one["tflops"] == pytest.approx(case["flops"] / (one["ms"] / 1e3) / 1e12)
                assert one["of_cublas"] == pytest.approx(steps["cuBLAS"]["ms"] / one["ms"])
    assert "naive: not finished after 75 s" in capsys.readouterr().out


def test_steps_are_chosen_by_name(fake: None, tmp_path: Path) -> None:
    assert run.bench(["l2_order", "no_dot"], tmp_path / "x.json", CPU) == []
    [case, _] = json.loads((tmp_path / "x.json").read_text())["cases"]
    assert list(case["steps"]) == ["l2_order", "no_dot", "cuBLAS"]
    with pytest.raises(UserError, match="no step 'fast'"):
        run.chosen(["fast"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    app = typer.Typer()
    app.command()(bench_matmul)
    done = CliRunner().invoke(app, [])
    assert isinstance(done.exception, UserError) and "no GPU" in done.exception.cause
