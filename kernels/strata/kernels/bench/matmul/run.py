"""`strata bench matmul`: every step of the matrix product beside cuBLAS, in alternating rounds of one run."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from strata.kernels.bench import ceilings
from strata.kernels.bench.case import Case, Contest, Missing
from strata.kernels.bench.harness import Row, Settings, measure
from strata.kernels.bench.matmul.probe import Shape, probe
from strata.kernels.bench.report import device_facts
from strata.kernels.ladder.steps import STEPS, Step, prepared
from strata.platform import benchmark_record
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic

CUBLAS = "cuBLAS"
# The second has no side that is a multiple of a tile; its rows still begin at multiples of 16 bytes, which TMA needs.
SHAPES: tuple[Shape, ...] = ((8192, 8192, 8192), (5000, 7000, 3000))
TOLERANCE = 4e-3  # rounding of the result to bf16 is 1.7e-3
# The first steps take seconds: once per round is enough for them. The fast ones run about 40 times per round.
SETTINGS = Settings(rounds=3, budget=60.0, fewest=1)


def bench(names: Sequence[str], path: Path | None, device: torch.device) -> list[str]:
    """Prints a table for each shape, writes JSON after each, and returns the names of the steps that failed."""
    steps = chosen(names)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    target = path or cache_dir() / "bench" / "matmul.json"
    console.print("running each step once, in processes of their own")
    troubles = probe([step.name for step in steps], SHAPES)
    top = ceilings.measure(device, SETTINGS.budget)
    header = benchmark_record.header("matmul")
    record = {
        **header,
        "machine": header["machine"] | device_facts(device),
        "copy_bytes_per_s": top.copy,
        "cases": [],
    }
    failed: dict[str, None] = {}
    for shape in SHAPES:
        title = " x ".join(f"{side:,}" for side in shape)
        case = Case("matmul", title, partial(contest, steps, shape, troubles))
        row = measure(case, device, SETTINGS, partial(_show, console, title))
        results = as_json(row, shape, steps)
        record["cases"].append(results)
        write_atomic(target, json.dumps(record, indent=2))
        console.print(table(results), *remarks(results))
        failed |= {step.name: None for step in steps if results["steps"][step.name]["ms"] is None}
    console.print(f"written to {target}")
    return list(failed)


def _show(console: Console, title: str, doing: str) -> None:
    console.print(f"{title}: {doing}")


def chosen(names: Sequence[str]) -> list[Step]:
    known = {step.name: step for step in STEPS}
    for name in names:
        if name not in known:
            raise UserError(f"There is no step '{name}'.", f"Use {', '.join(known)}.")
    return [known[name] for name in names] if names else list(STEPS)


def contest(steps: Sequence[Step], shape: Shape, troubles: Mapping[str, str], device: torch.device) -> Contest:
    """Inputs drawn anew. cuBLAS comes last, beside the fastest step, so that both meet the same temperature and clock."""
    rows, columns, inner = shape
    a, b = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((rows, inner), (inner, columns)))
    contenders: dict[str, Callable[[], Any] | Missing] = {}
    for step in steps:
        reason = troubles.get(step.name)
        contenders[step.name] = Missing(reason) if reason else partial(_run, step, a, b, _unwritten(a, b))
    contenders[CUBLAS] = partial(torch.mm, a, b, out=_unwritten(a, b))
    moved = a.element_size() * (rows * inner + inner * columns + rows * columns)
    return Contest(contenders, lambda: a.float() @ b.float(), TOLERANCE, moved, 2 * math.prod(shape))


def _unwritten(a: Tensor, b: Tensor) -> Tensor:
    """An output of NaN, which an element that no thread writes would show."""
    return torch.full((a.shape[0], b.shape[1]), math.nan, dtype=a.dtype, device=a.device)


def _run(step: Step, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    prepared(step, a, b, out)()
    return out


def as_json(row: Row, shape: Shape, steps: Sequence[Step]) -> dict[str, Any]:
    """A case. `of_cublas` is the share of cuBLAS's rate in the same run."""
    peer = row.results[CUBLAS].ms if CUBLAS in row.results else None
    described = {step.name: {"language": step.language, "title": step.title, "intensity": step.intensity} for step in steps}
    found = {}
    for name in (*described, CUBLAS):
        result = row.results.get(name)
        ms = result.ms if result else None
        found[name] = described.get(name, {}) | {
            "ms": ms,
            "rounds_ms": list(result.times) if result else [],
            "tflops": row.flops / ms / 1e9 if ms else None,
            "of_cublas": peer / ms if peer and ms else None,
            "relative_error": result.error if result else None,
            "trouble": result.trouble if result else row.trouble,
        }
    names = ("rows", "columns", "inner")
    return dict(zip(names, shape, strict=True)) | {
        "flops": row.flops, "bytes": row.bytes, "tolerance": row.tolerance, "steps": found,
    }  # fmt: skip


def table(results: Mapping[str, Any]) -> Table:
    sides = " x ".join(f"{results[side]:,}" for side in ("rows", "columns", "inner"))
    shown = Table(sides, box=None, header_style="bold", pad_edge=False)
    for column in ("ms", "TFLOP/s", "of cuBLAS", "error"):
        shown.add_column(column, justify="right")
    for name, one in results["steps"].items():
        if one["ms"] is None:
            shown.add_row(name, "failed", style="red")
            continue
        share = "-" if one["of_cublas"] is None else f"{one['of_cublas']:.1%}"
        shown.add_row(name, f"{one['ms']:.3f}", f"{one['tflops']:.1f}", share, f"{one['relative_error']:.1e}")
    return shown


def remarks(results: Mapping[str, Any]) -> list[Text]:
    return [Text(f"{name}: {one['trouble']}", style="red") for name, one in results["steps"].items() if one["trouble"]]
