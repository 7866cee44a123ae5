"""`strata kernels tune`: measures all candidates on each operation's tuning shapes and saves the fastest."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from strata.kernels import catalog
from strata.kernels.bench.clock import milliseconds
from strata.kernels.compiler.ahead import compile_ahead
from strata.kernels.tuning import tunable
from strata.platform.errors import UserError

BUDGET = 20.0  # milliseconds per candidate


@dataclass(frozen=True)
class Tuned:
    """`default` is the time of the untuned default; None if it does not fit the device."""

    line: str
    best: tunable.Config
    ms: float
    default: float | None


def tune(names: Sequence[str], ship: bool) -> None:
    ops = catalog.chosen(names)
    if not torch.cuda.is_available():
        raise UserError(
            "There is no GPU to measure on.",
            "Run this on the GPU that will run the kernels; Hopper's configurations are shipped.",
        )
    device, console = torch.device("cuda"), Console(highlight=False)
    arch = tunable.architecture(device)
    path = tunable.shipped_path(arch) if ship else tunable.measured_path(arch)
    found: list[Tuned] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for op in ops:
            tuned = _tuned(op, device, arch, progress)
            tunable.write(path, {one.line: one.best for one in tuned})  # per operation, so that an interrupt loses little
            found += tuned
    console.print(_table(found))
    console.print(f"written to {path}")


def _tuned(op: catalog.Op, device: torch.device, arch: int, progress: Progress) -> list[Tuned]:
    cases = [case for offer in catalog.functions_named(op, "tuning_cases") for case in offer(device)]
    task = progress.add_task(f"{op.name}: compiling", total=len(cases))
    candidates = [(case, one) for case in cases for one in case.tunable.candidates(arch, case.key)]
    compile_ahead(lambda case=case, one=one: case.run(one) for case, one in candidates)  # type: ignore[misc]
    progress.update(task, description=op.name)
    found = []
    for case in cases:
        [(line, times)] = tunable.tune([case], arch, lambda run: milliseconds(run, device, BUDGET)).items()
        default = case.tunable.candidates(arch, case.key)[0]
        if times:
            best, ms = times[0]
            found.append(Tuned(line, best, ms, next((time for one, time in times if one == default), None)))
        progress.advance(task)
    del cases, candidates
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _table(found: Sequence[Tuned]) -> Table:
    result = Table("kernel and shape", box=None, header_style="bold", pad_edge=False)
    for column in ("default ms", "best ms", "gain"):
        result.add_column(column, justify="right")
    result.add_column("best")
    for one in found:
        default = "does not fit" if one.default is None else f"{one.default:.4f}"
        gain = "-" if one.default is None else f"{one.default / one.ms - 1:.1%}"
        settings = " ".join(f"{name}={value}" for name, value in one.best.arguments().items())
        result.add_row(one.line, default, f"{one.ms:.4f}", gain, settings)
    return result


def listing() -> Table:
    """Table of operations, source files, and the number of tuned shapes, shipped and measured, per architecture."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("operation", "for", "does", "files", "shipped", "measured here"):
        result.add_column(column)
    shipped, measured = (_tables(folder) for folder in (tunable.shipped_path(0).parent, tunable.measured_path(0).parent))
    for op in catalog.OPS:
        names = {one.name for module in op.modules() for one in vars(module).values() if isinstance(one, tunable.Tunable)}
        files = "\n".join(path.name for path in op.files())
        result.add_row(op.name, op.use, op.does, files, _shapes(shipped, names), _shapes(measured, names))
    return result


def _tables(folder: Path) -> dict[str, tunable.Table]:
    return {path.stem: tunable.read(path) for path in sorted(folder.glob("sm_*.json"))}


def _shapes(tables: dict[str, tunable.Table], names: set[str]) -> str:
    counts = {arch: sum(line.split()[0] in names for line in table) for arch, table in tables.items()}
    return ", ".join(f"{arch}: {count}" for arch, count in counts.items() if count) or "-"
