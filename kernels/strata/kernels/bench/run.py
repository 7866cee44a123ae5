"""`strata bench kernels`: selects cases, measures them and writes table, JSON and roofline plot."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strata.kernels import catalog
from strata.kernels.bench import ceilings, plot, report
from strata.kernels.bench.case import Case
from strata.kernels.bench.cases import small
from strata.kernels.bench.harness import Row, Settings, measure
from strata.kernels.bench.selection import select
from strata.platform.files import cache_dir, write_atomic

# For CPUs, which also run other processes.
SHARED = Settings(rounds=5, budget=50.0)
QUICK = Settings(rounds=1, budget=10.0)


def bench(names: Sequence[str], quick: bool, json_path: Path | None, plot_path: Path | None) -> report.Outcome:
    """Runs the benchmark. Default paths are among the other benchmark results, in the cache folder."""
    ops = [op.name for op in catalog.chosen(names)]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings() if device.type == "cuda" else QUICK if quick else SHARED
    overhead: dict[str, float] = {}
    if device.type == "cuda":
        from strata.kernels.bench.overhead import measure as measure_overhead
        from strata.kernels.bench.precompile import precompile

        with console.status("compiling"):
            precompile(ops, quick)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # code is on disk by now, so no compile workers are needed
        cases = select(ops, quick)
        overhead = measure_overhead(ops, device)
    else:
        console.print(
            "No GPU found: measuring the operations' CPU implementations on small shapes against eager torch, in fp32."
            "\n'strata kernels stages' shows the compiled Triton kernels; their speed needs a GPU.\n"
        )
        cases = [case for case in small.cases() if case.op in ops]
    with console.status("measuring the ceilings"):
        top = ceilings.measure(device, settings.budget)
    target = json_path or cache_dir() / "bench" / "kernels.json"
    outcome = report.Outcome(device, [], top, overhead)
    console.print(report.heading())
    for row in _measured(cases, device, settings, console):
        outcome = replace(outcome, rows=[*outcome.rows, row])
        console.print(report.paragraph(row, top))
        write_atomic(target, json.dumps(report.as_json(outcome), indent=2))  # an interrupted run keeps its results so far
    plot_path = plot_path or target.with_suffix(".png")
    plot.draw(outcome, plot_path)
    _print_summary(outcome, console)
    console.print(f"written to {target} and {plot_path}")
    return outcome


def _measured(cases: Sequence[Case], device: torch.device, settings: Settings, console: Console) -> Iterator[Row]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            title = f"{case.op}, {case.name}"
            show = lambda doing, title=title: progress.update(task, description=f"{title}: {doing}")  # noqa: E731
            yield measure(case, device, settings, show)
            progress.advance(task)


def _print_summary(outcome: report.Outcome, console: Console) -> None:
    if outcome.overhead:
        console.print("", report.overhead_table(outcome))
    top = outcome.ceilings
    console.print(f"\nceilings of this run: copy {top.copy / 1e9:,.0f} GB/s, matmul {top.matmul / 1e12:.3g} TFLOP/s")
    verdicts = [met for row in outcome.rows for _, met in report.bars(row, top)]
    if verdicts:
        console.print(f"targets: {verdicts.count(True)} met, {verdicts.count(False)} missed, {verdicts.count(None)} not measured")
    for text in outcome.missed():
        console.print(f"  missed: {text}", markup=False)
