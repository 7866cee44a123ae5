"""Figures of kernel benchmarks and of compiled kernels, with worked numbers and without running a kernel."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from strata.kernels import catalog
from strata.kernels.bench import ceilings, clock, report, selection, tuner
from strata.kernels.bench.case import OURS, Bar, Case
from strata.kernels.bench.ceilings import Ceilings
from strata.kernels.bench.harness import Result, Row, Settings
from strata.kernels.compiler import calls, stages, view
from strata.kernels.tuning import tunable
from strata.kernels.tuning.tunable import config
from strata.platform.errors import UserError

CPU = torch.device("cpu")
# Copies 2 TB/s, multiplies at 500 TFLOP/s.
CEILINGS = Ceilings(copy=2e12, matmul=500e12)


def row(results: dict[str, Result], bytes: int = 0, flops: int = 0, limit: int | None = None, *bars: Bar) -> Row:
    return Row(Case("op", "shape", lambda _: None, bars, limit), results, bytes, flops, 0.01)  # type: ignore[arg-type, return-value]


def text(renderable: Any) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


# Statistics


def test_defaults_of_a_measurement() -> None:
    assert (Settings().rounds, Settings().budget) == (3, 25.0)


@pytest.mark.parametrize(("times", "ms"), [((), None), ((3.0,), 3.0), ((9.0, 1.0, 2.0), 2.0), ((1.0, 2.0, 4.0, 100.0), 3.0)])
def test_the_time_is_the_median_of_the_rounds(times: tuple[float, ...], ms: float | None) -> None:
    assert Result(times=times).ms == ms


@pytest.mark.parametrize(
    ("bytes", "flops", "ms", "share"),
    [
        (int(1e9), 0, 1.0, 0.5),  # 1 TB/s of 2
        (0, int(200e9), 1.0, 0.4),  # 200 TFLOP/s of 500
        (int(1e9), int(200e9), 1.0, 0.5),  # the tighter ceiling counts
        (int(1e9), int(400e9), 2.0, 0.4),
    ],
)
def test_the_share_of_the_tighter_ceiling(bytes: int, flops: int, ms: float, share: float) -> None:
    assert CEILINGS.share(bytes, flops, ms) == pytest.approx(share)


def test_ceilings_are_bytes_read_and_written_and_two_operations_per_product(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def two_ms(run: Any, device: torch.device, budget: float) -> float:
        run()
        budgets.append(budget)
        return 2.0

    monkeypatch.setattr(ceilings, "milliseconds", two_ms)
    found = ceilings.measure(CPU, 7.0)
    # On a CPU: 64 MiB copied and a product of 1024 x 1024 matrices, in 2 ms each.
    assert found.copy == pytest.approx(2 * 64 * 1024**2 * 500) and found.matmul == pytest.approx(2 * 1024**3 * 500)
    assert budgets == [7.0, 7.0]


OURS_2_MS = Result(0.001, (2.0,), 3_000_000)


@pytest.mark.parametrize(
    ("ours", "limit", "failed"),
    [
        (OURS_2_MS, None, False),
        (OURS_2_MS, 3_000_000, False),
        (OURS_2_MS, 2_999_999, True),
        (Result(0.001, (2.0,)), 0, False),  # memory is not measured on a CPU
        (Result(trouble="broken"), None, True),
    ],
)
def test_a_case_fails_without_our_kernel_or_above_its_memory(ours: Result, limit: int | None, failed: bool) -> None:
    assert row({OURS: ours}, limit=limit).failed is failed


def test_a_case_without_inputs_fails() -> None:
    broken = Row(Case("op", "shape", lambda _: None), {}, trouble="no memory")  # type: ignore[arg-type, return-value]
    assert broken.failed and broken.ours.trouble == "no memory" and broken.ratio("peer") is None


def test_ratios_are_to_the_fastest_of_the_named_peers() -> None:
    peers = {"a": Result(0.0, (3.0,)), "b": Result(0.0, (5.0,)), "c": Result(0.0, (1.0,)), "d": Result(trouble="x")}
    one = row({OURS: OURS_2_MS, **peers})
    assert one.peers() == {"a": 3.0, "b": 5.0, "c": 1.0}
    assert (one.ratio("a"), one.ratio("a", "b"), one.ratio("b", "c"), one.ratio("d"), one.ratio()) == (1.5, 1.5, 0.5, None, None)
    assert row({OURS: Result(trouble="x"), **peers}).ratio("a") is None


def test_targets_of_every_kind() -> None:
    one = row({OURS: OURS_2_MS, "peer": Result(0.0, (3.0,))}, int(2e9), int(500e9))
    reached = {of: one.reached(Bar(1, of), CEILINGS) for of in ("copy", "matmul", "TFLOP/s", "peer", "absent")}
    # 1 TB/s of 2, and 250 TFLOP/s of 500.
    assert reached == {"copy": 0.5, "matmul": 0.5, "TFLOP/s": 250.0, "peer": 1.5, "absent": None}
    assert row({OURS: Result(trouble="x")}).reached(Bar(1, "copy"), CEILINGS) is None


@pytest.mark.parametrize(("least", "met"), [(0.5, True), (0.51, False)])
def test_a_target_is_met_at_its_value(least: float, met: bool) -> None:
    one = row({OURS: OURS_2_MS}, int(2e9), 0, None, Bar(least, "copy"))
    assert report.bars(one, CEILINGS) == [(f"copy 50.0%, target {least:.1%}", met)]
    outcome = report.Outcome(CPU, [one], CEILINGS, {})
    assert outcome.missed() == ([] if met else [f"op, shape: copy 50.0%, target {least:.1%}"]) and outcome.failed() == []


def test_texts_of_targets() -> None:
    bars = (Bar(400, "TFLOP/s"), Bar(1.25, "peer"), Bar(0.6, "matmul"), Bar(1, "absent"))
    one = row({OURS: OURS_2_MS, "peer": Result(0.0, (3.0,))}, 0, int(500e9), 3_000_000, *bars)
    assert report.bars(one, CEILINGS) == [
        ("TFLOP/s 250, target 400", False),
        ("peer 1.5 x, target 1.25 x", True),
        ("matmul 50.0%, target 60.0%", False),
        ("absent not measured, target 1 x", None),
        ("3 MB extra memory, allowed 3 MB", True),
    ]
    failed = report.Outcome(CPU, [row({OURS: Result(trouble="x")}), one], CEILINGS, {})
    assert failed.failed() == ["op shape"]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1e+03 kB"), (1_000_000, "1 MB"), (1_500_000_000, "1.5 GB")],
)
def test_sizes(count: int, expected: str) -> None:
    assert report._size(count) == expected


def test_the_report_of_a_case() -> None:
    results = {
        OURS: OURS_2_MS,
        "slow": Result(0.02, (5.0,), 12),
        "fast": Result(0.0, (1.0,)),
        "absent": Result(trouble="not installed"),
        "off": Result(0.5, trouble="wrong: error", wrong=True),
    }
    lines = text(report.paragraph(row(results, int(2e9), int(500e9), None, Bar(0.5, "copy")), CEILINGS))
    assert lines == [
        "op, shape",
        # ms, GB/s, TFLOP/s, share of the ceiling, ratio, error, memory.
        "strata 2.000 1,000 250.0 50% 0.50 x best 1.0e-03 3 MB",
        "slow 5.000 400 100.0 20% 2.50 x 2.0e-02 12 B",
        "fast 1.000 2,000 500.0 100% 0.50 x 0.0e+00 -",
        "absent: not installed",
        "off: wrong: error",
        "target met: copy 50.0%, target 50.0%",
    ]


def test_slow_copies_have_three_digits_and_cases_without_work_none() -> None:
    slow = row({OURS: Result(0.0, (100.0,))}, int(9.99e9), 0)
    assert text(report.paragraph(slow, CEILINGS))[1] == "strata 100.000 99.9 - 5% - 0.0e+00 -"
    exact = row({OURS: Result(0.0, (100.0,))}, int(10e9), 0)
    assert text(report.paragraph(exact, CEILINGS))[1] == "strata 100.000 100 - 5% - 0.0e+00 -"
    none = row({OURS: Result(0.0, (100.0,))}, 0, int(50e12))
    assert text(report.paragraph(none, CEILINGS))[1] == "strata 100.000 - 500.0 100% - 0.0e+00 -"


def test_the_json_of_a_case() -> None:
    results = {OURS: OURS_2_MS, "peer": Result(0.02, (5.0, 4.0), 12), "absent": Result(trouble="x")}
    one = row(results, int(2e9), int(500e9), 9, Bar(0.6, "copy"), Bar(0.5, "copy"), Bar(1, "absent"))
    made = report.row_as_json(one, CEILINGS)
    assert [bar["met"] for bar in made["bars"]] == [False, True, None] and made["ratio_to_best_peer"] == 2.25
    assert (made["bytes"], made["flops"], made["tolerance"], made["memory_limit"]) == (int(2e9), int(500e9), 0.01, 9)
    assert made["contenders"][OURS]["ratio"] is None and made["contenders"][OURS]["of_ceiling"] == pytest.approx(0.5)
    peer = made["contenders"]["peer"]
    assert (peer["ms"], peer["rounds_ms"], peer["ratio"], peer["extra_bytes"]) == (4.5, [5.0, 4.0], 2.25, 12)
    assert made["contenders"]["absent"]["of_ceiling"] is None and made["contenders"]["absent"]["trouble"] == "x"


def test_the_overhead_of_a_call() -> None:
    outcome = report.Outcome(CPU, [], CEILINGS, {"a": 1.26, "b": 10.0})
    assert text(report.overhead_table(outcome)) == ["call on tiny tensors host µs", "a 1.3", "b 10.0"]


# Clock


@pytest.mark.parametrize(
    ("first", "budget", "runs"),
    [(1.0, 3.0, [3]), (1.0, 3.9, [3]), (1.0, 4.0, [3, 4]), (1.0, 1000.0, [3, 200]), (0.0, 1.0, [3, 200]), (10.0, 5.0, [3])],
)
def test_as_many_runs_as_fit_the_budget(monkeypatch: pytest.MonkeyPatch, first: float, budget: float, runs: list[int]) -> None:
    counts = []

    def times(run: Any, count: int) -> list[float]:
        counts.append(count)
        return [first, first, 100.0] if count == 3 else [7.0] * count

    monkeypatch.setattr(clock, "_cpu_times", times)
    assert clock.milliseconds(lambda: None, CPU, budget) == (first if len(runs) == 1 else 7.0)
    assert counts == runs


def test_times_on_a_cpu_are_milliseconds_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran = iter([1.0, 1.002, 2.0, 2.005]), []
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now))
    assert clock._cpu_times(lambda: ran.append(1), 2) == pytest.approx([2.0, 5.0]) and len(ran) == 3


def test_the_host_time_of_a_call_is_the_median_of_batches_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [9.0, 0.001, 0.003, 0.002]  # of each batch, the first a warm-up
    now, ran = iter([point for length in seconds for point in (5.0, 5.0 + length)]), []
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert clock.host_microseconds(lambda: ran.append(1), calls=10, batches=3) == pytest.approx(200.0)
    assert len(ran) == 40


# Selection and catalog


def test_quick_runs_only_cases_with_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(name: str, *bars: Bar) -> Case:
        return Case("op", name, lambda _: None, bars)  # type: ignore[arg-type, return-value]

    for cases, quick in (
        ([case("a"), case("b", Bar(1, "x")), case("c", Bar(1, "x"))], ["b", "c"]),
        ([case("a"), case("b")], ["a"]),
    ):
        offered = SimpleNamespace(benchmark=lambda cases=cases: SimpleNamespace(cases=lambda: cases))
        monkeypatch.setattr(catalog, "chosen", lambda _, offered=offered: [offered])
        assert [one.name for one in selection.select([], quick=True)] == quick
        assert selection.select([], quick=False) == cases


def test_operations_are_chosen_by_name() -> None:
    assert [op.name for op in catalog.chosen(["swiglu", "rope"])] == ["swiglu", "rope"]
    assert catalog.chosen([]) == catalog.chosen(None) == list(catalog.OPS) and len(catalog.OPS) == 9
    with pytest.raises(UserError, match="no operation 'x'"):
        catalog.chosen(["rope", "x"])


def test_files_of_an_operation() -> None:
    names = {op.name: [path.name for path in op.files()] for op in catalog.OPS}
    assert names["rope"] == ["rope.py"]
    first, *others = names["flash_attention"]
    assert first == "flash_attention.py" and others == sorted(others) and first not in others
    assert not any(name.startswith("_") for name in others)


# Launch configurations


def test_defaults_of_a_configuration() -> None:
    assert config(BLOCK=8).arguments() == {"BLOCK": 8, "num_warps": 4, "num_stages": 2}
    assert tunable.Config({}).arguments() == {"num_warps": 4, "num_stages": 2}


def test_paths_of_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tunable.measured_path(90) == tmp_path / ".strata" / "kernels" / "sm_90.json"  # STRATA_HOME of the test
    monkeypatch.delenv("STRATA_HOME")
    assert tunable.measured_path(80) == Path.home() / ".strata" / "kernels" / "sm_80.json"
    assert tunable.shipped_path(90).parts[-2:] == ("tuned", "sm_90.json") and tunable.shipped_path(90).is_file()
    assert tunable.read(tmp_path / "none.json") == {}


def test_the_architecture_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tunable.architecture(CPU) == 0
    token = tunable.compiling_for.set(80)
    assert tunable.architecture(torch.device("meta")) == 80
    tunable.compiling_for.reset(token)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 1))
    assert tunable._capability.__wrapped__(torch.device("cuda")) == 121


@pytest.mark.parametrize(("size", "rounded"), [(4, 4), (5, 8), (1023, 1024), (1024, 1024), (1025, 2048)])
def test_buckets(size: int, rounded: int) -> None:
    assert tunable.bucket(size) == rounded


def test_the_table_of_gains() -> None:
    found = [
        tuner.Tuned("toy 1", config(BLOCK=8), 0.5, 0.6),
        tuner.Tuned("toy 2", config(num_warps=8, BLOCK=4), 0.25, None),
    ]
    assert text(tuner._table(found)) == [
        "kernel and shape default ms best ms gain best",
        "toy 1 0.6000 0.5000 20.0% BLOCK=8 num_warps=4 num_stages=2",
        "toy 2 does not fit 0.2500 - BLOCK=4 num_warps=8 num_stages=2",
    ]


def test_tuned_shapes_are_counted_by_kernel() -> None:
    tables = {"sm_80": {"a 1": config()}, "sm_90": {"a 1": config(), "a 2": config(), "b 1": config()}}
    assert tuner._shapes(tables, {"a"}) == "sm_80: 1, sm_90: 2"
    assert tuner._shapes(tables, {"b"}) == "sm_90: 1"
    assert tuner._shapes(tables, {"c"}) == "-"


# Compiled kernels

SASS = """
        /*0000*/                   LDG.E.128 R4, [R2.64] ;
        /*0010*/              @!P0 HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0030*/                   STL [R1], R4 ;
        /*0040*/                   NOP ;
.L_x_1:
"""


def test_instructions_are_counted() -> None:
    mnemonics = stages.opcodes(SASS)
    assert mnemonics == Counter({"HMMA.16816.F32": 2, "LDG.E.128": 1, "STL": 1, "NOP": 1})
    assert stages.matching("HMMA", mnemonics) == 2 and stages.matching("HM", mnemonics) == 0
    assert stages.matching("(LDL|STL)", mnemonics) == 1 and stages.matching(stages.WIDE, mnemonics) == 1
    assert stages._number("REG", "REG:40 STACK:8") == 40 and stages._number("STACK", "REG:40 STACK:8") == 8
    assert stages._readable("\t.headerflags\n" + SASS).count("\n") == 5


def compiled(**changes: Any) -> stages.Compiled:
    compilation = SimpleNamespace(
        name="kernel",
        constants=lambda: {"BLOCK": 64, "dtype": torch.float32, "tag": "x"},
        options={"num_warps": 8, "maxnreg": None},
    )
    values: dict[str, Any] = {
        "compilation": compilation,
        "arch": 90,
        "texts": {},
        "registers": 128,
        "stack": 0,
        "shared": 232_448,
        "warps": 8,
        "spilled": 0,
        "tensor_cores": {"wgmma": 4, "mma.sync": 0},
        "tma": {"loads": 2, "stores": 1},
        "wide": 5,
        "loads": {"128": 4, "16": 1},
        "async_copies": 6,
        "instructions": 1234,
        "seconds": 1.2345,
    }
    return stages.Compiled(**(values | changes))


def test_facts_of_a_kernel() -> None:
    assert view.facts(compiled()) == {
        "architecture": "sm_90",
        "constants": "BLOCK=64\ntag=x",
        "warps": "8",
        "registers per thread": "128",
        "shared memory": "232,448 bytes",
        "spills": "none",
        "tensor cores": "4 wgmma",
        "TMA": "2 loads, 1 stores",
        "asynchronous copies": "6",
        "global loads": "4 x 128 bits, 1 x 16 bits",
        "128-bit accesses": "5",
        "instructions": "1,234",
        "compiled in": "1.2 s",
    }


@pytest.mark.parametrize(("arch", "most"), [(80, 166_912), (90, 232_448), (100, 232_448)])
def test_shared_memory_of_a_block_is_limited(arch: int, most: int) -> None:
    assert not view.facts(compiled(arch=arch, shared=most))["shared memory"].endswith("(too much)")
    assert view.facts(compiled(arch=arch, shared=most + 1))["shared memory"].endswith("(too much)")


@pytest.mark.parametrize(
    ("stack", "spilled", "expected"),
    [(0, 0, "none"), (8, 0, "8 bytes, 0 instructions"), (0, 3, "0 bytes, 3 instructions"), (8, 3, "8 bytes, 3 instructions")],
)
def test_spills(stack: int, spilled: int, expected: str) -> None:
    assert view.facts(compiled(stack=stack, spilled=spilled))["spills"] == expected


def test_the_json_of_a_kernel() -> None:
    made = view.as_json(compiled())
    assert made["constants"] == {"BLOCK": 64, "dtype": "torch.float32", "tag": "x"}
    assert made["options"] == {"num_warps": 8, "maxnreg": "None"} and made["seconds"] == 1.234
    assert (made["kernel"], made["registers"], made["tma"], made["instructions"]) == (
        "kernel",
        128,
        {"loads": 2, "stores": 1},
        1234,
    )


def test_differing_facts_are_bold_and_spills_red() -> None:
    def styles(*variants: stages.Compiled) -> dict[str, str]:
        table = view.summary({str(number): one for number, one in enumerate(variants)})
        return {name: str(each.style) for name, each in zip(view.facts(compiled()), table.rows, strict=True)}

    assert set(styles(compiled(), compiled()).values()) == {""}
    assert {name for name, style in styles(compiled(), compiled(registers=9)).items() if style} == {"registers per thread"}
    assert styles(compiled(stack=8), compiled(stack=8))["spills"] == "red"
    assert styles(compiled(stack=8), compiled())["spills"] == "bold"


def test_an_excerpt_is_the_window_with_the_most_weight() -> None:
    lines = [f"  %{i} = arith.addi" for i in range(20)]
    lines[3] = "  tt.load a"  # 2
    lines[12], lines[14] = "  tt.dot b", "  ex2 c"  # 4 and 1
    lines[18] = "  tt.store d"  # 2
    found = view.excerpt("\n".join(["#loc = x", "", *lines]), lines=4).splitlines()
    # Lines 11 to 14 are the first window with both the product and the exponential.
    assert found == [lines[11], lines[12], lines[13], lines[14]]
    assert view.excerpt("a\nb", lines=4) == "a\nb"
    assert len(view.excerpt("\n".join(lines)).splitlines()) == 14


def test_lines_are_shortened() -> None:
    assert view._short("        /*0010*/       HMMA R1 ;  ") == "  HMMA R1 ;"
    assert view._short("  %1 = tt.load %0 loc(#loc1)") == "  %1 = tt.load %0"
    assert view._short('  %1 = x loc("a"(#loc))') == "  %1 = x"
    assert view._short("  ret void, !dbg !12") == "  ret void"
    assert view._short("\tmov.u32") == "  mov.u32"


def test_stages_without_text_are_skipped() -> None:
    one, other = compiled(texts={"ptx": "a\nb", "sass": "c"}), compiled(texts={"ptx": "d"})
    titles = [str(group.renderables[0]).strip() for group in view.shortened([one, other])]  # type: ignore[union-attr]
    assert titles == ["PTX, 2 lines and 1 lines", "SASS, 1 lines"]


# Calls of the stages


def shapes(monkeypatch: pytest.MonkeyPatch, op: str, *functions: str) -> dict[str, list[Any]]:
    """Shapes of the tensors, and the other arguments, of each labelled call."""
    module = next(each for each in catalog.OPS if each.name == op).module()
    seen: list[Any] = []

    def record(*arguments: Any, **options: Any) -> Any:
        for value in (*arguments, *options.values()):
            seen.append(tuple(value.shape) if isinstance(value, torch.Tensor) else value)
        return arguments[0] * 1

    for function in functions:
        monkeypatch.setattr(module, function, record)
    found = {}
    for label, call in calls.calls(op).items():
        seen.clear()
        call()
        found[label] = list(seen)
    return found


def test_shapes_of_the_compiled_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (8192, 4096)
    assert shapes(monkeypatch, "rms_norm", "rms_norm", "add_rms_norm") == {
        "": [rows, (4096,), 1e-6],
        "with residual": [rows, rows, (4096,), 1e-6],
    }
    heads, table = [(8192, 32, 128), (8192, 8, 128)], [(8192, 64), (8192, 64)]
    assert shapes(monkeypatch, "rope", "rope", "rope_") == {
        "": [*((1, *each) for each in heads), *table],
        "in place": [*heads, *table, (8192,)],
    }
    assert shapes(monkeypatch, "swiglu", "swiglu") == {"": [(8192, 14336), (8192, 14336)]}
    assert shapes(monkeypatch, "flash_attention", "flash_attention") == {
        "": [(1, 8192, 32, 128), (1, 8192, 8, 128), (1, 8192, 8, 128)]
    }
    assert shapes(monkeypatch, "linear_cross_entropy", "linear_cross_entropy") == {"": [(16, 16), (131072, 16), (16,)]}
    # 32 sequences of 512 blocks of 16 tokens.
    batch = [(16384, 16, 8, 128), (16384, 16, 8, 128), (32, 512), (32,), (33,)]
    assert shapes(monkeypatch, "paged_attention", "paged_attention") == {
        "": [(32, 32, 128), *batch, 1, 8192],
        "prefill": [(8192, 32, 128), *batch, 2048, 8192],
    }
    assert shapes(monkeypatch, "kv_cache_write", "kv_cache_write") == {
        "": [(32, 8, 128), (32, 8, 128), (32, 16, 8, 128), (32, 16, 8, 128), (32,)]
    }
