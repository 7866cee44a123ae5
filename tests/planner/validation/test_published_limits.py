"""`strata plan validate`: its limits, its published figures and its verdict, all written here apart from the planner."""

import csv
import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from strata.planner.catalogue.library import model
from strata.planner.catalogue.software import program
from strata.planner.cli import check_regimes, comparison
from strata.planner.cli.comparison import Check, Row
from strata.planner.layout import Layout
from strata.planner.validation import check_collectives, check_memory, check_training, limits, trust
from strata.planner.validation.trust import Errors
from strata.platform.cli import build
from strata.platform.hardware import catalogue as hardware

PUBLISHED = Path(check_training.__file__).parent / "published"


def lines_of(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def steps() -> list[check_training.Row]:
    return check_training.rows()


# Limits


def test_limits_are_those_of_the_documentation() -> None:
    assert limits.limits_of("step time") == limits.Limits(mean=0.06, worst=0.15)
    assert limits.limits_of("memory") == limits.Limits(mean=None, worst=0.01)
    assert limits.limits_of("collectives") == limits.Limits(mean=0.08, worst=0.20)


def test_a_check_without_limits_in_the_file_is_an_error() -> None:
    with pytest.raises(KeyError):
        limits.limits_of("everything")


@pytest.mark.parametrize(
    ("mean", "worst", "mean_bar", "worst_bar", "passed"),
    [
        (0.06, 0.15, 0.06, 0.15, True),
        (0.061, 0.15, 0.06, 0.15, False),
        (0.06, 0.151, 0.06, 0.15, False),
        (0.061, 0.151, 0.06, 0.15, False),
        (9.0, 0.01, None, 0.01, True),
        (0.0, 0.02, None, 0.01, False),
        (0.07, 9.0, 0.08, None, True),
        (0.09, 0.0, 0.08, None, False),
        (9.0, 9.0, None, None, True),
    ],
)
def test_a_check_passes_up_to_its_limits(
    mean: float, worst: float, mean_bar: float | None, worst_bar: float | None, passed: bool
) -> None:
    assert Check("check", {}, mean, worst, mean_bar, worst_bar).passed == passed


@pytest.mark.parametrize(("worsts", "code"), [((0.1, 0.1), 0), ((0.3, 0.1), 1), ((0.1, 0.3), 1), ((0.3, 0.3), 1)])
def test_the_exit_code_is_1_when_any_limit_is_exceeded(
    worsts: tuple[float, float], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Check(f"check {worst}", {"t": [Row("r", 1.0, 1.1, "s", 0.1)]}, 0.01, worst, 0.02, 0.2) for worst in worsts]
    monkeypatch.setattr(comparison, "checks", lambda: found)
    result = CliRunner().invoke(build(), ["plan", "validate"], env={"COLUMNS": "140"})
    assert result.exit_code == code
    assert ("over the limit" in result.stdout) == bool(code)
    assert result.stdout.count("  ok") == worsts.count(0.1)
    written = json.loads(CliRunner().invoke(build(), ["plan", "validate", "--json", "-"]).stdout)
    assert [check["passed"] for check in written["checks"]] == [worst == 0.1 for worst in worsts]


# Published figures


def test_step_times_follow_from_the_published_throughput() -> None:
    """Floating-point operations by the papers' formulas, over the published rate of all GPUs."""
    for name, factor, logits in (("megatron_a100_2021.csv", 96, 16), ("megatron_core_h100_2024.csv", 72, 12)):
        for line in lines_of(name):
            b, s, layers, h, v = (int(line[key]) for key in ("global_batch", "seq", "layers", "hidden", "vocab"))
            flops = factor * b * s * layers * h * h * (1 + s / (6 * h) + v / (logits * layers * h))
            rate = float(line["tflops_per_gpu"]) * 1e12 * int(line["gpus"])
            digits = len(line["derived_step_s"].partition(".")[2])
            assert float(line["derived_step_s"]) == pytest.approx(flops / rate, abs=0.51 * 10.0**-digits), line


def test_collective_times_follow_from_the_published_bus_bandwidth() -> None:
    """A rank of a ring of 8 sends 7/4 of its buffer. Bus and algorithm bandwidth, both published, differ by the same factor."""
    lines = lines_of("allreduce_8xh200.csv")
    for line in lines:
        size, bus, own = int(line["bytes"]), float(line["busbw_gb_s"]), float(line["algbw_gb_s"])
        assert float(line["derived_us"]) == pytest.approx(size * 1.75 / bus / 1e3, rel=1e-6)
        assert own * 1.75 == pytest.approx(bus, abs=0.012)
    sizes = [int(line["bytes"]) for line in lines]
    assert sizes[0] == 32 * 2**10 and sizes[-1] == 16 * 2**30
    assert all(more == 2 * less for less, more in pairwise(sizes))


@pytest.mark.slow
def test_published_figures_reach_the_comparison_unchanged(steps: list[check_training.Row]) -> None:
    """The figures of the first table are those of its file. Korthikanti's table 5 has two columns, Megatron-Core's five rows."""
    by_table: dict[str, list[float]] = {}
    for row in steps:
        by_table.setdefault(row.table, []).append(row.published)
    assert list(by_table) == ["Megatron, A100, 2021", "Korthikanti, A100, 2022", "Megatron-Core, H100, 2024"]
    first, second, third = by_table.values()
    assert first == [float(line["derived_step_s"]) for line in lines_of("megatron_a100_2021.csv")] and len(first) == 10
    assert second == [1.42, 1.10, 18.13, 13.75, 49.05, 37.83, 94.42, 71.49]
    assert third == [float(line["derived_step_s"]) for line in lines_of("megatron_core_h100_2024.csv")] and len(third) == 5
    curve = check_collectives.published_allreduce()
    assert [row.measured * 1e6 for row in curve] == pytest.approx(
        [float(line["derived_us"]) for line in lines_of("allreduce_8xh200.csv")]
    )
    assert [row.measured_busbw / 1e9 for row in curve][:2] == pytest.approx([1.44, 2.93])
    assert [row.bytes for row in curve][:2] == [32768, 65536]


def test_planned_figures_meet_the_limits_by_a_separate_calculation(steps: list[check_training.Row]) -> None:
    errors = [abs(row.planned / row.published - 1) for row in steps if row.planned is not None]
    assert len(errors) == 23 and sum(errors) / 23 <= 0.06 and max(errors) <= 0.15
    assert check_training.mean_error(steps) == pytest.approx(sum(errors) / 23)
    assert check_training.worst_error(steps) == pytest.approx(max(errors))
    curve = check_collectives.published_allreduce()
    factors = [max(row.predicted / row.measured, row.measured / row.predicted) for row in curve]
    assert math.prod(factors) ** (1 / 20) - 1 <= 0.08
    assert check_collectives.mean_error(curve) == pytest.approx(math.prod(factors) ** (1 / 20) - 1)
    assert check_collectives.worst_error(curve) == pytest.approx(max(abs(row.predicted / row.measured - 1) for row in curve))


def test_the_zero_paper_by_its_own_formula() -> None:
    """Mixed-precision Adam: 2 bytes of parameters, 2 of gradients, 12 of optimizer state; each stage shards one more."""
    rows = check_memory.zero_table()
    assert len(rows) == 30
    for row in rows:
        n = row.dp
        per_parameter = {1: 2 + 2 + 12 / n, 2: 2 + (2 + 12) / n, 3: 16 / n}[row.zero]
        assert row.predicted == pytest.approx(row.params_b * per_parameter)
        assert abs(row.error) < 0.002
    # 7.5B on 64 GPUs in the paper: 31.4, 16.6 and 1.9 GB
    assert {row.zero: row.published for row in rows if (row.params_b, row.dp) == (7.5, 64)} == {1: 31.4, 2: 16.6, 3: 1.88}


@pytest.mark.parametrize(
    ("printed", "predicted", "error"),
    [
        ("0.12", 0.13, 0.13 / 0.125 - 1),
        ("0.12", 0.11, 0.11 / 0.115 - 1),
        ("0.12", 0.1249, 0.0),
        ("0.12", 0.1151, 0.0),
        ("120", 120.4, 0.0),
        ("120", 121.0, 121 / 120.5 - 1),
        ("41.3", 41.2, 41.2 / 41.25 - 1),
    ],
)
def test_memory_errors_count_from_the_printed_interval(printed: str, predicted: float, error: float) -> None:
    assert check_memory.Row(7.5, 4, 2, printed, predicted).error == pytest.approx(error, abs=1e-12)


def test_memory_error_statistics() -> None:
    rows = [check_memory.Row(1, 1, 1, "100", planned) for planned in (100.0, 201.0, 49.75)]  # errors 0, +1, -0.5
    assert check_memory.worst_error(rows) == pytest.approx(1.0)
    assert check_memory.mean_error(rows) == pytest.approx(0.5)
    assert check_memory.worst_error(rows[::2]) == pytest.approx(0.5)


def curve_row(predicted: float) -> check_collectives.Row:
    return check_collectives.Row(1, 1.0, 0.0, predicted, 0.0, "")


def test_collective_error_statistics() -> None:
    """Factors of 2 and 1/4 have the geometric mean sqrt(8). Their errors are +100% and -75%."""
    rows = [curve_row(2.0), curve_row(0.25)]
    assert check_collectives.mean_error(rows) == pytest.approx(math.sqrt(8) - 1)
    assert check_collectives.worst_error(rows) == pytest.approx(1.0)
    assert check_collectives.worst_error(rows[1:]) == pytest.approx(0.75)


def test_step_error_statistics() -> None:
    rows = [check_training.Row("t", "m", 10.0, planned) for planned in (12.0, 5.0, None)]
    assert [row.error for row in rows] == [pytest.approx(0.2), pytest.approx(-0.5), None]
    assert check_training.mean_error(rows) == pytest.approx(0.35)
    assert check_training.worst_error(rows) == pytest.approx(0.5)


# Regimes


def regime_row(unit: str, published: float, planned: float | None) -> check_regimes.Row:
    return check_regimes.Row("dense", "source", "name", unit, published, planned, "")


@pytest.mark.parametrize("unit", ["tokens_s_gpu", "model_tflops", "mfu_pct", "tokens_s", "busbw_GB_s"])
def test_errors_of_rates_are_those_of_their_time(unit: str) -> None:
    """Half the published rate takes twice the time."""
    assert regime_row(unit, 100.0, 50.0).error == pytest.approx(1.0)


@pytest.mark.parametrize("unit", ["step_s", "M GPU-hours", "GiB_reserved", "GB", "itl_ms", "ttft_ms (p50)", "time_us"])
def test_errors_of_times_and_memory_are_planned_over_published(unit: str) -> None:
    assert regime_row(unit, 100.0, 50.0).error == pytest.approx(-0.5)


def test_errors_of_a_regime() -> None:
    rows = [regime_row("step_s", 10.0, planned) for planned in (12.0, 9.0, 17.0, None)]
    found = check_regimes.errors(rows)
    assert found == Errors(3, pytest.approx(1.0 / 3), pytest.approx(0.8 / 3), pytest.approx(-0.1), pytest.approx(0.7))


def test_figures_of_a_training_plan_in_published_units() -> None:
    step = SimpleNamespace(seconds=4.0, tokens_per_s=3000.0, model_flops=96e12, mfu=0.45)
    memory = SimpleNamespace(peak=30 * 2**30, fullest=SimpleNamespace(runtime=6 * 2**30))
    found = SimpleNamespace(step=step, layout=SimpleNamespace(gpus=8), budget=SimpleNamespace(gpu_hours=2.5e6), memory=memory)
    expected = {
        "step_s": 4.0,
        "tokens_s_gpu": 375.0,
        "model_tflops": 3.0,
        "mfu_pct": 45.0,
        "M GPU-hours": 2.5,
        "GiB_reserved": 24.0,
        "GB": 24 * 2**30 / 1e9,
    }
    assert {name: figure(found) for name, figure in check_regimes.TRAINED.items()} == pytest.approx(expected)  # type: ignore[arg-type]


def test_figures_of_a_serving_plan_in_published_units() -> None:
    found = SimpleNamespace(aggregated=SimpleNamespace(itl_s=0.02, ttft_p50_s=0.3), tokens_per_s=700.0)
    expected = {"itl_ms": 20.0, "ttft_ms (p50)": 300.0, "tokens_s": 700.0}
    assert {name: figure(found) for name, figure in check_regimes.SERVED.items()} == pytest.approx(expected)


def test_figures_of_other_runs_are_per_gpu() -> None:
    step = SimpleNamespace(seconds=4.0, tokens_per_s=3000.0, model_flops=96e12, hardware_flops=120e12)
    found = {name: measure(step) for name, (_, measure) in check_training.MEASURES.items()}  # type: ignore[arg-type]
    assert found == pytest.approx({"hardware_tflops": 30.0, "model_tflops": 24.0, "tokens_per_gpu": 3000.0})


# Trust

DENSE = model("llama-3.1-8b")
MEGATRON_CORE = program("megatron-core")


@pytest.mark.parametrize(
    ("name", "zero", "sequence", "software", "regimes"),
    [
        ("llama-3.1-8b", 1, 32767, "megatron-core", []),
        ("llama-3.1-8b", 1, 32768, "megatron-core", ["long"]),
        ("llama-3.1-8b", 2, 8192, "megatron-core", ["sharded"]),
        ("llama-3.1-8b", 0, 8192, "torch-fsdp", ["sharded"]),
        ("llama-3.1-8b", 1, 8192, "strata", ["other-program"]),
        ("llama-3.1-8b", 3, 8192, "strata", ["sharded", "other-program"]),
        ("mixtral-8x7b", 3, 65536, "strata", ["experts", "long", "sharded", "other-program"]),
    ],
)
def test_regimes_of_a_plan(name: str, zero: int, sequence: int, software: str, regimes: list[str]) -> None:
    assert trust.regimes_of(model(name), Layout(zero=zero), sequence, program(software)) == regimes


@pytest.mark.parametrize(
    ("gpu", "layout", "unchecked"),
    [
        ("h100-sxm", Layout(), ()),
        ("a100-40gb", Layout(), ()),
        ("b200", Layout(), ()),
        ("h200", Layout(), ("on h200",)),
        ("h100-sxm", Layout(offload="optimizer"), ("with offloading",)),
        ("h100-sxm", Layout(precision="fp32"), ("in fp32",)),
        ("h100-sxm", Layout(sequence=2), ("with sequences split by heads",)),
    ],
)
def test_unchecked_properties_of_a_plan(gpu: str, layout: Layout, unchecked: tuple[str, ...]) -> None:
    found = trust.of_training(DENSE, layout, 8192, hardware.gpu(gpu), MEGATRON_CORE)
    assert found.unchecked == unchecked
    assert found.validated == (not unchecked)
    assert (found.line == "") == found.validated


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of every regime: four figures, from 30% below to 20% above."""
    found = {name: Errors(4, 0.155, -0.05, -0.30, 0.20) for name in trust.REGIMES}
    found["throughput"] = Errors(1, 0.06, -0.06, -0.06, -0.06)
    monkeypatch.setattr(trust, "_all_errors", lambda: found)


@pytest.mark.usefixtures("errors")
def test_lines_of_expected_errors() -> None:
    gpu = hardware.gpu("h100-sxm")
    line = trust.of_training(DENSE, Layout(zero=3), 8192, gpu, MEGATRON_CORE).line
    assert line == (
        f"Outside the validated regime ({trust.VALIDATED}). ZeRO-2, ZeRO-3 and FSDP: 16% off on average (30% too fast to 20% too"
        " slow, 4 published figures); memory of a GPU under FSDP and nanotron: 16% off on average (30% too small to 20% too"
        " large, 4 published figures)."
    )
    long = trust.of_training(DENSE, Layout(), 32768, gpu, MEGATRON_CORE)
    assert list(long.regimes) == ["long"] and "memory" not in long.line
    assert list(trust.of_training(DENSE, Layout(), 8192, gpu, program("strata")).regimes) == ["other-program", "memory"]
    serving = trust.of_serving()
    assert list(serving.regimes) == ["ttft", "itl", "throughput"] and not serving.validated
    assert serving.line.endswith("serving: output tokens per second: 6% off on average (1 published figure).")
    assert list(trust.of_collectives(1).regimes) == ["one-node"]
    assert list(trust.of_collectives(2).regimes) == ["between-nodes"]


# Tables


def text_of(*parts: object) -> str:
    console = Console(width=160, highlight=False, force_terminal=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def styles_of(*parts: object) -> str:
    console = Console(width=160, highlight=False, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def test_tables_mark_rows_over_the_limit() -> None:
    rows = [
        Row("fine", 2.0, 2.2, "s", 0.1),
        Row("at", 2.0, 2.4, "s", 0.2),
        Row("low", 2.0, 1.5, "s", -0.25),
        Row("none", 2.0, None, "s", None, "refused: a reason"),
    ]
    check = Check("check", {"a table": rows}, 0.1, 0.25, None, 0.2)
    text = text_of(*comparison.tables([check]))
    cells = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert cells["fine"] == ["fine", "2", "s", "2.2", "s", "+10.0%"]
    assert cells["low"] == ["low", "2", "s", "1.5", "s", "-25.0%"]
    assert cells["none"][:5] == ["none", "2", "s", "-", "-"] and "refused: a reason" in text
    assert cells["check:"] == ["check:", "mean", "10.0%,", "worst", "25.0%", "(limit", "20%)", "over", "the", "limit"]
    red = "\x1b[31m"
    marked = [line for line in styles_of(*comparison.tables([check])).splitlines() if red in line]
    assert len(marked) == 1 and "-25.0%" in marked[0]
    free = Check("free", {"a table": rows[:3]}, 0.1, 9.0)
    assert red not in styles_of(*comparison.tables([free]))
    assert "limit" not in text_of(comparison.summary(free)) and "ok" not in text_of(comparison.summary(free))
    assert text_of(comparison.summary(Check("one", {}, 0.1, 0.2, 0.15, mean_kind="geometric mean"))).strip() == (
        "one: geometric mean 10.0% (limit 15%), worst 20.0%  ok"
    )


def test_notes_of_step_times_have_units_other_than_seconds() -> None:
    rows = [
        check_training.Row("a", "m", 1.0, 2.0, note="does not fit"),
        check_training.Row("b", "m", 1.0, 2.0, "tokens/s", "does not fit"),
        check_training.Row("b", "n", 1.0, 2.0, "tokens/s"),
    ]
    found = comparison._by_table(rows)
    assert {name: [row.note for row in group] for name, group in found.items()} == {
        "a": ["does not fit"],
        "b": ["tokens/s; does not fit", "tokens/s"],
    }
    assert found["a"][0] == Row("m", 1.0, 2.0, "s", 1.0, "does not fit")


def test_the_table_of_regimes_has_held_out_checks_only() -> None:
    rows = {"a": [Row("r", 1.0, 1.2, "", 0.2), Row("r", 1.0, 0.7, "", -0.3)], "b": [Row("r", 1.0, None, "", None)]}
    held_out = Check("held out, serving", rows, 0.25, 0.3, signed=-0.05)
    text = text_of(comparison.regimes([held_out, Check("limited", rows, 0.25, 0.3)]))
    assert "limited" not in text
    [line] = [line for line in text.splitlines() if line.startswith("serving")]
    assert line.split() == ["serving", "2", "25.0%", "-5.0%", "-30%", "+20%"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123456, "s", "12.3 ms"),
        (999.96, "GB", "1000"),
        (1000.0, "", "1,000"),
        (1234.5, "", "1,234"),
        (0.12345, "GB", "0.1235"),
    ],
)
def test_figures_have_four_digits(value: float, unit: str, text: str) -> None:
    assert comparison._figure(value, unit) == text


@pytest.mark.slow
def test_checks_have_their_limits_and_every_regime(steps: list[check_training.Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_training, "rows", lambda: steps)
    found = {check.name: check for check in comparison.checks()}
    bars = {
        name: (check.mean_bar, check.worst_bar)
        for name, check in found.items()
        if (check.mean_bar, check.worst_bar) != (None, None)
    }
    assert bars == {"step time": (0.06, 0.15), "memory": (None, 0.01), "collectives": (0.08, 0.20)}
    assert len(found) == 4 + len(trust.REGIMES) and all(check.passed for check in found.values())
    for name, description in trust.REGIMES.items():
        check, errors = found[f"held out, {description}"], json.loads((PUBLISHED / "errors.json").read_text())[name]
        own = [row.error for rows in check.tables.values() for row in rows if row.error is not None]
        assert check.mean == pytest.approx(sum(map(abs, own)) / len(own)) == pytest.approx(errors["mean"], abs=2e-4)
        assert check.worst == pytest.approx(max(map(abs, own)))
        assert check.signed == pytest.approx(sum(own) / len(own)) == pytest.approx(errors["signed"], abs=2e-4)
    assert found["memory"].tables["ZeRO paper: state of a GPU, GB"][0].name == "7.5B parameters, 1 GPU, ZeRO-1"
    assert found["memory"].tables["ZeRO paper: state of a GPU, GB"][3].name == "7.5B parameters, 4 GPUs, ZeRO-1"
    monkeypatch.setattr(comparison, "checks", lambda: list(found.values()))
    result = CliRunner().invoke(build(), ["plan", "validate"], env={"COLUMNS": "140"})
    assert result.exit_code == 0
    for words in ("Megatron, A100, 2021", "Korthikanti", "Megatron-Core", "ZeRO", "all-reduce on 8 H200", "worst"):
        assert words in result.stdout
