"""`strata bench kernels`: wrong contenders are not timed, failed contenders are listed, and targets are judged by medians."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from strata.kernels import catalog
from strata.kernels.bench import plot, report, run
from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.bench.cases import small
from strata.kernels.bench.ceilings import Ceilings
from strata.kernels.bench.harness import Result, Row, Settings, measure, relative_error
from strata.kernels.commands import bench_kernels
from strata.platform.errors import UserError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ONCE = Settings(rounds=2, budget=0.1)
CEILINGS = Ceilings(copy=4e12, matmul=800e12)


def contest(**contenders: Callable[[], Any] | Missing) -> Case:
    x = torch.randn(64, 64)
    everyone = {OURS: lambda: x * 2, **contenders}
    return Case("double", "64 x 64", lambda device: Contest(everyone, lambda: x.double() * 2, 1e-5, bytes=2 * x.nbytes))


def ran(case: Case) -> Row:
    return measure(case, CPU, ONCE, lambda doing: None)


def raising() -> Tensor:
    raise RuntimeError("out of memory [sm_90]\nand a page of details")


def test_correct_contender_is_timed_in_every_round() -> None:
    row = ran(contest(peer=lambda: torch.full((64, 64), math.nan)))
    assert len(row.ours.times) == ONCE.rounds and row.ours.error is not None and row.ours.error <= 1e-5
    assert not row.failed


def test_wrong_contender_is_listed_and_not_timed() -> None:
    row = ran(contest(off=lambda: torch.ones(64, 64), none=lambda: torch.full((64, 64), math.nan)))
    for name in ("off", "none"):
        assert row.results[name].wrong and not row.results[name].times
    assert row.peers() == {}


def test_failing_or_missing_contender_is_listed() -> None:
    row = ran(contest(broken=raising, absent=Missing("not installed")))
    assert row.results["broken"].trouble == "RuntimeError: out of memory [sm_90]"
    assert row.results["absent"].trouble == "not installed"
    assert row.ours.ms is not None
    text = shown(report.Outcome(CPU, [row], CEILINGS, {}))
    assert "out of memory [sm_90]" in text and "not installed" in text


def test_contender_that_fails_later_is_excluded_and_others_continue() -> None:
    calls: list[None] = []

    def fails_later() -> Tensor:
        calls.append(None)
        if len(calls) > 3:
            raise RuntimeError("no more")
        return truth

    truth = torch.randn(8)
    case = Case("op", "x", lambda device: Contest({"peer": fails_later, OURS: lambda: truth}, lambda: truth, 1e-5))
    row = ran(case)
    assert row.results["peer"].trouble == "RuntimeError: no more" and len(row.ours.times) == ONCE.rounds


def test_case_whose_inputs_do_not_fit_is_listed() -> None:
    def build(device: torch.device) -> Contest:
        raise torch.OutOfMemoryError("tried to allocate 500 GiB")

    row = ran(Case("op", "huge", build))
    assert row.failed and "500 GiB" in shown(report.Outcome(CPU, [row], CEILINGS, {}))


def test_shape_mismatch_is_an_error() -> None:
    row = ran(contest(transposed=lambda: torch.zeros(64)))
    assert "shapes" in (row.results["transposed"].trouble or "")


def test_relative_error_is_the_largest_over_outputs() -> None:
    truth = (torch.ones(100), torch.full((100,), 10.0))
    assert relative_error((truth[0], truth[1] + 1), truth) == pytest.approx(0.1)
    assert relative_error((truth[0] + 1e-3, truth[1]), truth) == pytest.approx(1e-3, rel=1e-3)
    assert math.isnan(relative_error((truth[0] * math.nan, truth[1]), truth))
    assert relative_error((torch.zeros(3),), (torch.zeros(3),)) == 0
    assert relative_error((torch.ones(4),), (torch.zeros(4),)) == 2  # absolute if the reference is zero


def timed(*bars: Bar, extra: int | None = None, limit: int | None = None) -> Row:
    """Strata takes 1 ms for 3.6 GB and 0.4 TFLOP: 90% of the copy bandwidth, half of the matrix-product rate."""
    results = {
        OURS: Result(1e-3, (1.0, 0.9, 1.1), extra),
        "fast": Result(1e-3, (0.8,)),
        "slow": Result(1e-3, (2.0, 2.0)),
        "absent": Result(trouble="not installed"),
    }
    return Row(Case("op", "shape", raising, bars, limit), results, bytes=int(3.6e9), flops=int(0.4e12), tolerance=1e-2)  # type: ignore[arg-type]


def test_targets_are_judged_by_the_median_of_rounds() -> None:
    row = timed(Bar(0.9, "copy"), Bar(0.6, "matmul"), Bar(400, "TFLOP/s"), Bar(1.0, "fast"), Bar(1.5, "slow"), Bar(1.0, "absent"))
    assert [met for _, met in report.bars(row, CEILINGS)] == [True, False, True, False, True, None]
    assert row.ratio("fast", "slow") == pytest.approx(0.8)  # relative to the fastest
    assert report.Outcome(CPU, [row], CEILINGS, {}).missed() == [
        "op, shape: matmul 50.0%, target 60.0%",
        "op, shape: fast 0.8 x, target 1 x",
    ]
    assert CEILINGS.share(row.bytes, row.flops, 1.0) == pytest.approx(0.9)  # bandwidth is the tighter ceiling


def test_exceeding_the_memory_limit_is_a_failure() -> None:
    assert not timed(extra=10**9, limit=2 * 10**9).failed
    row = timed(extra=3 * 10**9, limit=2 * 10**9)
    assert row.failed and report.bars(row, CEILINGS) == [("3 GB extra memory, allowed 2 GB", False)]


def test_json_records_machine_and_versions(tmp_path: Path) -> None:
    outcome = report.Outcome(CPU, [timed(Bar(0.9, "copy"))], CEILINGS, {"op": 12.3})
    found = json.loads(json.dumps(report.as_json(outcome)))
    assert found["versions"]["torch"] == torch.__version__ and found["machine"]["cores"] and found["date"]
    [case] = found["cases"]
    assert case["contenders"][OURS]["rounds_ms"] == [1.0, 0.9, 1.1] and case["contenders"]["slow"]["ratio"] == 2.0
    assert case["bars"] == [{"least": 0.9, "of": "copy", "reached": pytest.approx(0.9), "met": True}]
    plot.draw(outcome, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def shown(outcome: report.Outcome) -> str:
    console = Console(width=250)
    with console.capture() as capture:
        for row in outcome.rows:
            console.print(report.paragraph(row, outcome.ceilings))
    return capture.get()


@pytest.mark.parametrize("op", [op.name for op in catalog.OPS])
def test_every_operation_has_a_benchmark_with_cases(op: str) -> None:
    cases = run.select([op], quick=False)
    assert cases and {case.op for case in cases} == {op}
    assert run.select([op], quick=True)
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("case", small.cases(), ids=lambda case: f"{case.op}, {case.name}")
def test_cpu_implementation_is_correct_on_small_shapes(case: Case) -> None:
    row = measure(case, CPU, Settings(rounds=1, budget=0.0), lambda doing: None)
    assert not row.failed, row.ours.trouble
    assert row.results["torch eager"].trouble is None


def test_cpu_implementations_are_measured_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(run, "QUICK", ONCE)
    bench_kernels(["swiglu"], quick=True, json=tmp_path / "kernels.json", plot=None)
    printed = capsys.readouterr().out
    assert "No GPU" in printed and "CPU implementations" in printed and "swiglu" in printed and "rope" not in printed
    assert {case["op"] for case in json.loads((tmp_path / "kernels.json").read_text())["cases"]} == {"swiglu"}
    assert (tmp_path / "kernels.png").is_file()


def test_command_fails_if_a_strata_kernel_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = contest(**{OURS: lambda: torch.zeros(64, 64)})
    monkeypatch.setattr(run, "QUICK", ONCE)
    monkeypatch.setattr(run, "select", lambda ops, quick: [wrong])
    monkeypatch.setattr(small, "cases", lambda: [Case("swiglu", wrong.name, wrong.build)])
    with pytest.raises(UserError, match="swiglu 64 x 64"):
        bench_kernels(["swiglu"], quick=True, json=tmp_path / "kernels.json", plot=None)


def test_unknown_operation_is_rejected_with_the_valid_names() -> None:
    with pytest.raises(UserError, match="no operation 'softmax'") as error:
        bench_kernels(["softmax"])
    assert "rms_norm" in error.value.fix
