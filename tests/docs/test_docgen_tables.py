"""Tables of the results pages from small runs: numbers, units, ratios and missed aims in bold."""

from typing import Any

import pytest
from docgen import faults, kernels, markdown, planner, record, serving, training
from docgen.serving import Metric


def rows(text: str) -> list[list[str]]:
    """Cells of the first Markdown table, without its heading."""
    lines = next(line for line in text.split("\n\n") if line.startswith("|")).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# Numbers


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (markdown.number(None), "-"),
        (markdown.number(1234.5), "1,234"),
        (markdown.number(0.256, ".1%"), "25.6%"),
        (markdown.number(1.26, ".1f", " s"), "1.3 s"),
        (markdown.milliseconds(None), "-"),
        (markdown.milliseconds(0.0999), "99.9 ms"),
        (markdown.milliseconds(0.1), "100 ms"),
        (markdown.milliseconds(12.0), "12,000 ms"),
        (markdown.duration(None), "-"),
        (markdown.duration(0.5), "500 µs"),
        (markdown.duration(0.9994), "999 µs"),
        (markdown.duration(1.0), "1 ms"),
        (markdown.duration(2.345), "2.35 ms"),
        (markdown.signed(0.25), "+25%"),
        (markdown.signed(-0.125, 1), "\u221212.5%"),
        (markdown.size(999), "999 B"),
        (markdown.size(1000), "1 kB"),
        (markdown.size(1e6), "1 MB"),
        (markdown.size(2.5e9), "2.5 GB"),
        (markdown.bold("x"), "**x**"),
        (markdown.bold("x", False), "x"),
    ],
)
def test_numbers(made: str, expected: str) -> None:
    assert made == expected


def test_tables_align_numbers_right() -> None:
    assert markdown.table(("a", "b", "c"), [("1", "2|3", "4\n5")], numeric=1) == (
        "| a | b | c |\n| --- | ---: | ---: |\n| 1 | 2\\|3 | 4 5 |"
    )
    assert markdown.table(("a", "b"), []) == "| a | b |\n| --- | --- |"


# Provenance


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"cores": 8, "architecture": "x86_64", "gpus": []}, "8 cores x86_64, no GPU"),
        ({"cores": 8}, "8 cores, no GPU"),
        ({"cores": 8, "gpus": ["H200, 1 MiB, 550"]}, "H200, 8 cores"),
        ({"cores": 8, "gpus": ["H200, 1 MiB", "H200, 1 MiB", "L4, 2"]}, "2 x H200, L4, 8 cores"),
    ],
)
def test_hardware(machine: dict[str, Any], expected: str) -> None:
    assert record.hardware({"machine": machine}) == expected
    assert record.hardware({"machine": machine, "hardware": "mine"}) == "mine"


def test_headings() -> None:
    run = {"benchmark": "serve", "date": "2026-11-02T10:00:00", "hardware": "mine", "versions": {"torch": "2.9+cu", "x": "1"}}
    assert record.heading(run) == "2026-11-02 · mine · torch 2.9"
    assert record.heading({**run, "versions": None}) == "2026-11-02 · mine"
    assert record.heading({**run, "benchmark": "plan-validate"}) == "2026-11-02"
    assert record.notes({"note": "a", "partial": True, "transcribed": True}) == ["a", record.PARTIAL, record.TRANSCRIBED]
    assert record.notes({"note": "", "partial": False}) == []


def test_commands_without_outputs() -> None:
    def command(line: str) -> str:
        return record.command({"command": line})

    assert command("") == ""
    assert command("a --json x.json b --plot=y.png --jsonl z") == "```sh\na b --jsonl z\n```"
    assert command("a 'b c' d{1} \"it's\"") == '```sh\na "b c" "d{1}" \'it\'"\'"\'s\'\n```'


@pytest.mark.parametrize(("length", "lines"), [(8, 1), (9, 2)])
def test_commands_are_wrapped_at_110_characters(length: int, lines: int) -> None:
    """The first line has 101 characters; with a word of 8 and a space, it has 110."""
    words = ["x" * 101, "y" * length]
    assert len(record._wrapped(words)) == lines
    assert record._wrapped(["x" * 101, "y" * 9])[-1] == f"  {'y' * 9}"
    unsplit = record._wrapped(["x" * 100, "--o", "v" * 20, "w" * 20])
    assert unsplit == [f"{'x' * 100} --o {'v' * 20} \\", f"  {'w' * 20}"]


# Serving


@pytest.mark.parametrize(
    ("metric", "ratio", "missed"),
    [
        (Metric("m", "", "k", least=0.9), 0.9, False),
        (Metric("m", "", "k", least=0.9), 0.89, True),
        (Metric("m", "", "k", most=1.2), 1.2, False),
        (Metric("m", "", "k", most=1.2), 1.21, True),
        (Metric("m", "", "k"), 99, False),
    ],
)
def test_missed_aims(metric: Metric, ratio: float, missed: bool) -> None:
    assert metric.misses(ratio) is missed


def test_aims_of_serving() -> None:
    aims = {metric.name: (metric.least, metric.most) for metric in serving.UNIFORM}
    assert aims == {"output tokens/s": (0.97, None), "TTFT p50": (None, 1.1), "ITL p50": (None, 1.2), "ITL p99": (None, 1.2)}
    assert [metric.aim for metric in serving.MIXED if metric.least or metric.most] == [
        "output tokens/s at least 0.9",
        "ITL p99, short prompts at most 0.33",
    ]


def served(**strata: Any) -> record.Run:
    level = {"concurrency": 8}
    bare = {"level": level, "summary": {"tokens_per_s": 1000.0, "ttft_p50": 0.05, "itl_p50": 0.01, "itl_p99": 0.02}}
    ours = {"level": level, "summary": {"tokens_per_s": 960.0, "ttft_p50": 0.055, "itl_p50": 0.0121}, "ratios": {"ttft_p50": 1.2}}
    workload = {"name": "uniform", "input": 6, "output": 4}
    return {
        "settings": {"workload": workload, "clients": 2, "rounds": 1, "side_by_side": True},
        "contenders": {"vllm": {"about": "bare", "levels": [bare]}, "strata": {"about": "ours", "levels": [ours | strata]}},
    }


def test_the_table_of_serving() -> None:
    text = serving.serve(served())
    assert rows(text) == [
        ["8 concurrent", "output tokens/s", "1,000", "960", "**0.96**"],
        ["", "TTFT p50", "50.0 ms", "55.0 ms", "**1.20**"],  # the run's own ratio
        ["", "ITL p50", "10.0 ms", "12.1 ms", "**1.21**"],
        ["", "ITL p99", "20.0 ms", "-", "-"],
    ]
    assert "2 client processes; servers up side by side; one round." in text
    assert "may limit" not in text
    doubted = served(doubts="busy")
    doubted["settings"] |= {"clients": 1, "rounds": 3, "side_by_side": False}
    text = serving.serve(doubted | {"failed": {"ray": "It ended.\nTrace"}})
    assert "1 client process; servers started in sequence; medians of 3 rounds." in text
    assert "may limit these figures: `strata`, 8 concurrent: busy." in text and "`ray` has no figures: It ended." in text


def test_a_ratio_of_another_contender_is_never_bold() -> None:
    run = served()
    run["contenders"]["other"] = run["contenders"].pop("strata")
    assert rows(serving.serve(run))[0] == ["8 concurrent", "output tokens/s", "1,000", "960", "0.96"]


def test_mixed_loads_have_a_share_of_long_prompts() -> None:
    run = served(kinds={"short": {"itl_p99": 0.004}}, ratios_of_kinds={"short": {"itl_p99": 0.34}})
    run["settings"]["workload"] = {"name": "mixed", "input": 6, "output": 4, "long_share": 0.25, "long_input": 3000}
    run["contenders"]["vllm"]["levels"][0]["level"] = run["contenders"]["strata"]["levels"][0]["level"] = {"rate": 2.5}
    text = serving.serve(run)
    assert "25% of the prompts 3,000 tokens long" in text
    assert rows(text)[0][0] == "2.5 requests/s" and rows(text)[3] == ["", "ITL p99, short prompts", "-", "4.0 ms", "**0.34**"]


def test_the_time_to_the_first_answer() -> None:
    seconds = {"strata": [3.0, 1.0, 2.0], "bare": [4.0, 8.0]}
    run = {"machine": {"gpus": []}, "seconds": seconds, "ratio_of_medians": 1.01}
    text = serving.startup(run)
    assert rows(text) == [["strata", "2.0 s", "1.0 s", "3.0 s"], ["bare", "6.0 s", "4.0 s", "8.0 s"]]
    assert "Ratio of the medians: **1.01**" in text
    assert "Ratio of the medians: 1.00 " in serving.startup(run | {"ratio_of_medians": 1.0})
    assert "Ratio of the medians: 1.01 (aim: at most 1.2)" in serving.startup(run | {"machine": {"gpus": ["H200"]}})


def test_the_bandwidth_of_transfers() -> None:
    run = {"bytes": 2**30, "device": "gpu", "readings": {"nixl": {"64": {"total_s": 0.1, "post_s": 0.01}}}}
    text = serving.transfer(run)
    assert (
        rows(text) == [["nixl", "64", "100 ms", "10.0 ms", "10.7 GB/s"]] and "1024 MiB between two processes, GPU memory" in text
    )


@pytest.mark.parametrize(
    ("ratio", "error", "shown"),
    [(0.98, 0.01, "**0.980 ± 0.010**"), (0.99, 0.01, "0.990 ± 0.010"), (0.999, None, "**0.999**"), (1.0, None, "1.000")],
)
def test_the_plugin_misses_parity_beyond_its_standard_error(ratio: float, error: float | None, shown: str) -> None:
    run = {
        "ratio_to_vllm": {"w": {"vllm": {}, "strata": {"ratio": ratio, "standard_error": error}}},
        "answers": {"strata": {"equal": 3, "of": 4, "log_probabilities_apart": {"mean": 0.0012, "most": 0.5}}},
    }
    speeds, answers = serving.vllm_plugin(run).split("\n\n")
    assert rows(speeds) == [["w", "`strata`", shown]]
    assert rows(answers) == [["`strata`", "3 of 4", "0.001", "0.500"]]


# Training


@pytest.mark.parametrize(("ratio", "shown"), [(0.95, "0.95"), (0.94, "**0.94**"), (None, "-")])
def test_training_aims_at_95_percent_of_bare_torch(ratio: float | None, shown: str) -> None:
    ours = {
        "name": "Strata",
        "tokens_per_s": 1234.0,
        "mfu": 0.456,
        "ratio_to_bare": ratio,
        "ratio_to_liger": 1.5,
        "rounds": [{}, {"peak_memory_bytes": 3 * 2**30, "final_loss": 1.2345}],
    }
    recipe = {
        "model": {"layers": 2, "hidden": 64, "context": 16},
        "train": {"batch": 8, "precision": "bf16"},
        "parallel": {"workers": 1, "zero": 1},
    }
    run = {"contenders": {"ours": ours, "other": {**ours, "name": "x", "ratio_to_bare": 0.5, "rounds": [{}]}}, "recipe": recipe}
    text = training.train(run | {"left_out": {"liger": "absent"}})
    assert rows(text) == [
        ["Strata", "1,234", "45.6%", "3.0 GiB", "1.234", shown, "1.50"],
        ["x", "1,234", "45.6%", "-", "-", "0.50", "1.50"],
    ]
    assert "1 worker, ZeRO 1." in text and "Not run: liger: absent" in text
    run["recipe"]["parallel"]["workers"] = 2
    assert "2 workers, ZeRO 1." in training.train(run)


def test_stalls_and_memory() -> None:
    assert rows(training.checkpoint({"median_seconds": {"sync": 0.2, "async": 0.05}})) == [
        ["sync", "200 ms", "1.000"],
        ["async", "50.0 ms", "0.250"],
    ]
    layouts = [
        {"layout": "a", "planned": 3 * 2**20, "measured": 4 * 2**20, "error": -0.1},
        {"layout": "b", "planned": None, "error": -0.101},
        {"layout": "c", "planned": 0, "measured": 2**20, "error": 0.101},
    ]
    assert rows(training.memory({"layouts": layouts, "bar": 0.1})) == [
        ["a", "3 MiB", "4 MiB", "\u221210.0%"],
        ["b", "-", "-", "**\u221210.1%**"],
        ["c", "-", "1 MiB", "**+10.1%**"],
    ]


# Kernels


def kernel(op: str = "rope", **changes: Any) -> dict[str, Any]:
    """A case of 1 GB and 2 TFLOP in 0.5 ms, at twice the speed of its peer."""
    contenders = {
        "strata": {"ms": 0.5, "of_ceiling": 0.9, "extra_bytes": None, "ratio": None},
        "peer": {"ms": 1.0, "ratio": 2.0},
    }
    case = {
        "op": op,
        "case": "a",
        "bytes": 10**9,
        "flops": 2 * 10**12,
        "contenders": contenders,
        "bars": [],
        "memory_limit": None,
    }
    return case | changes


def bar(of: str, met: bool | None) -> dict[str, Any]:
    return {"least": 1, "of": of, "reached": 2.0, "met": met}


def with_ours(**changes: Any) -> dict[str, Any]:
    contenders = kernel()["contenders"]
    return {**contenders, "strata": contenders["strata"] | changes}


def kernels_run(*cases: dict[str, Any]) -> record.Run:
    return {"copy_bytes_per_s": 4.2e12, "matmul_flops_per_s": 8e14, "cases": list(cases)}


@pytest.mark.parametrize(
    ("case", "cells"),
    [
        (kernel(), ["a", "500 µs", "2,000 GB/s", "90%", "2.00"]),
        (kernel("flash_attention"), ["a", "500 µs", "4,000 TFLOP/s", "90%", "2.00"]),
        (kernel("linear_cross_entropy", flops=0), ["a", "500 µs", "2,000 GB/s", "90%", "2.00"]),
        (kernel("flash_attention", bars=[bar("TFLOP/s", False)]), ["a", "500 µs", "**4,000 TFLOP/s**", "90%", "2.00"]),
        (kernel("flash_attention", bars=[bar("TFLOP/s", True)]), ["a", "500 µs", "4,000 TFLOP/s", "90%", "2.00"]),
        (kernel(bytes=0), ["a", "500 µs", "-", "90%", "2.00"]),
        (kernel(bars=[bar("copy", False)]), ["a", "500 µs", "2,000 GB/s", "**90%**", "2.00"]),
        (kernel(bars=[bar("matmul", False)]), ["a", "500 µs", "2,000 GB/s", "**90%**", "2.00"]),
        (kernel(bars=[bar("copy", True)]), ["a", "500 µs", "2,000 GB/s", "90%", "2.00"]),
        (kernel(bars=[bar("peer", False)]), ["a", "500 µs", "2,000 GB/s", "90%", "**2.00**"]),
        (kernel(bars=[bar("peer", None)]), ["a", "500 µs", "2,000 GB/s", "90%", "2.00"]),
        (kernel(contenders=with_ours(of_ceiling=None)), ["a", "500 µs", "2,000 GB/s", "-", "2.00"]),
        (kernel(contenders=with_ours(ms=None)), ["a", "**failed**", "-", "-", "2.00"]),
    ],
)
def test_a_line_of_the_kernels(case: dict[str, Any], cells: list[str]) -> None:
    assert rows(kernels.kernels(kernels_run(case))) == [cells]


@pytest.mark.parametrize(("ratio", "shown"), [(0.99, "0.99"), (0.994, "0.994"), (0.9996, "1.000"), (1.0, "1.00"), (1.5, "1.50")])
def test_ratios_just_below_one_have_a_third_digit(ratio: float, shown: str) -> None:
    contenders = kernel()["contenders"] | {"peer": {"ms": 1.0, "ratio": ratio}}
    assert rows(kernels.kernels(kernels_run(kernel(contenders=contenders))))[0][-1] == shown


def test_the_summary_of_the_kernels() -> None:
    first = kernel(bars=[bar("peer", True), bar("copy", False)], contenders=with_ours(extra_bytes=5000), memory_limit=5000)
    second = kernel(case="b", bars=[bar("x", None)], contenders=with_ours(extra_bytes=5001), memory_limit=5000)
    text = kernels.kernels(kernels_run(first, second))
    assert "copy 4,200 GB/s, matrix product 800 TFLOP/s. Bars: 2 met, 2 missed, 1 not measured." in text
    assert "a: 5 kB of memory beside inputs and outputs, 5 kB allowed." in text
    assert "b: **5 kB of memory beside inputs and outputs, 5 kB allowed**." in text
    assert "Bars: 2 met, 1 missed." in kernels.kernels(kernels_run(first))
    unmeasured = kernel(bars=[bar("peer", True)], memory_limit=5)
    text = kernels.kernels(kernels_run(unmeasured))
    assert "Bars: 1 met, 0 missed." in text and "beside inputs" not in text


def test_queues_of_the_planner() -> None:
    waits = {
        "jobs": 3,
        "gpu_hours": 1234.5,
        "mean_s": 60.0,
        "p95_s": 7200.0,
        "p99_s": 7200.0,
        "longest_s": 7200.0,
        "slowdown": 1.25,
    }
    figures = {"utilisation": 0.5, "fragmentation": 0.0125, "blocks": 1.5, "preemptions": 1000, "bound_s": 100.0}
    policies = {
        name: {"all": waits, "teams": {"a": waits}, "at_head_s": at_head, **figures}
        for name, at_head in (("x", 100.0), ("y", 101.0))
    }
    run = {"policies": policies, "teams": [{"name": "a", "quota": 1024}], "jobs": 3, "source": "mine", "gpus": 2048}
    text = planner.plan_queue(run)
    assert text.startswith("3 jobs (mine) on 2,048 GPUs; quotas: a 1,024.")
    times = ["60 s", "2 h", "2 h", "2 h"]
    use = ["1.2", "50.0%", "1.2%", "1.50", "1,000"]
    assert rows(text) == [["x", *times, "100 s", *use], ["y", *times, "**101 s**", *use]]
    assert rows(text.split("\n\n", 2)[2]) == [[name, "a", "3", "1,234", *times, "1.2"] for name in "xy"]


def test_errors_of_the_planner() -> None:
    def check(**changes: Any) -> dict[str, Any]:
        figures = {"x": [1, 2], "y": [3]}
        errors = {"mean": 0.056, "mean_kind": "mean", "worst": 0.21, "mean_bar": 0.1, "worst_bar": 0.3}
        return {"name": "n", "tables": figures, "passed": True, **errors, **changes}

    missed = check(passed=False, mean_kind="geometric", mean_bar=None, worst_bar=None)
    assert rows(planner.plan_validate({"checks": [check(), missed]})) == [
        ["n", "3", "5.6%", "21.0%", "mean 10%, worst 30%"],
        ["n", "3", "**5.6% (geometric)**", "21.0%", "none"],
    ]


# Faults


def chaos_run(**changes: Any) -> record.Run:
    numbers = {"kills": 3, "sent": 2000, "lost": 0, "different": 0, "not back": 0, "whole in the end": True}
    kills = [{"kind": "b", "back_after_s": 3.0}, {"kind": "a", "back_after_s": 1.0}, {"kind": "b", "back_after_s": 5.0}]
    return {"numbers": numbers | changes, "passes": {"disturbed": {"longest_gap_s": 1.26}}, "kills": kills}


def test_kills_without_a_loss() -> None:
    first, second = faults.chaos(chaos_run()).split("\n\n")
    assert [cells[1] for cells in rows(first)] == ["3", "2,000", "2,000", "0", "0", "0", "-", "yes", "1.3 s"]
    assert rows(second) == [["a", "1", "1.0 s", "1.0 s"], ["b", "2", "4.0 s", "5.0 s"]]


def test_losses_are_bold() -> None:
    changes = {"lost": 2, "different": 1, "not back": 1, "ended though not killed": 1, "whole in the end": False}
    run = chaos_run(**changes)
    run["kills"] = [{"kind": "a", "back_after_s": None}]
    first, second = faults.chaos(run).split("\n\n")
    assert [cells[1] for cells in rows(first)][2:8] == ["**1,997**", "**2**", "**1**", "**1**", "**1**", "**no**"]
    assert rows(second) == [["a", "1", "**never**", "**never**"]]
    assert rows(faults.chaos(chaos_run(**{"ended though not killed": 0})))[6][1] == "0"


def test_hostile_requests() -> None:
    run = {
        "requests": 1500,
        "by_status": {"200": 1000, "400": 498, "503": 2},
        "wrong_answers": 1,
        "broken_streams": 0,
        "longest_pause_s": 0.256,
        "largest_growth_mib": 12.4,
    }
    assert [cells[1] for cells in rows(faults.hostile(run))] == [
        "1,500",
        "1,000 x 200, 498 x 400, 2 x 503",
        "**2**",
        "**1**",
        "0",
        "0.26 s",
        "12 MiB",
    ]
    quiet = run | {"by_status": {}, "wrong_answers": 0, "broken_streams": 1}
    assert [cells[1] for cells in rows(faults.hostile(quiet))][1:5] == ["-", "0", "0", "**1**"]
