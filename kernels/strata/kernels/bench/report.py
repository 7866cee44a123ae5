"""Benchmark results as tables, and as JSON with machine, versions, date and the time of every round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from strata.kernels.bench.case import OURS
from strata.kernels.bench.ceilings import Ceilings
from strata.kernels.bench.harness import Result, Row
from strata.platform import benchmark_record

WIDTHS = {"ms": 8, "GB/s": 6, "TFLOP/s": 7, "of ceiling": 10, "Strata vs": 12, "error": 7, "memory": 7}  # of the columns
CONTENDER_WIDTH = 16


@dataclass(frozen=True)
class Outcome:
    """`overhead` is host microseconds per call, by name; empty on a CPU, where there is no launch."""

    device: torch.device
    rows: Sequence[Row]
    ceilings: Ceilings
    overhead: Mapping[str, float]

    def missed(self) -> list[str]:
        """Descriptions of the missed targets."""
        judged = [(row, text, met) for row in self.rows for text, met in bars(row, self.ceilings)]
        return [f"{row.case.op}, {row.case.name}: {text}" for row, text, met in judged if met is False]

    def failed(self) -> list[str]:
        return [f"{row.case.op} {row.case.name}" for row in self.rows if row.failed]


def heading() -> Table:
    return _columns([""], [dict(zip(WIDTHS, WIDTHS, strict=True))], "bold")


def paragraph(row: Row, ceilings: Ceilings) -> Group:
    """Report of a case: timed contenders in columns, failed or missing contenders with their reason, and targets."""
    timed = [name for name, one in row.results.items() if one.times]
    figures = [_figures(row, name, row.results[name], ceilings) for name in timed]
    title = Text(f"{row.case.op}, {row.case.name}", style="bold")
    return Group(title, _columns(timed, figures, ""), *_remarks(row, ceilings))


def _columns(names: Sequence[str], lines: Sequence[Mapping[str, str]], style: str) -> Table:
    """Grid with fixed column widths, so that the columns of all cases are aligned."""
    result = Table.grid(padding=(0, 1))
    result.add_column(width=CONTENDER_WIDTH, no_wrap=True)
    for width in WIDTHS.values():
        result.add_column(width=width, justify="right", no_wrap=True)
    for name, line in zip(names, lines, strict=True):
        cells = [line.get(column, "-") for column in WIDTHS]
        result.add_row(f"  {name}", *cells, style="green" if name == OURS else style)
    return result


def _remarks(row: Row, ceilings: Ceilings) -> list[Text]:
    remarks = [Text(f"  {row.trouble}", style="red")] if row.trouble else []
    for name, one in row.results.items():
        if one.trouble:
            remarks.append(Text(f"  {name}: {one.trouble}", style="red" if one.wrong or name == OURS else "dim"))
    colours = {True: "green", False: "red", None: "dim"}
    words = {True: "met", False: "missed", None: "not measured"}
    return remarks + [Text(f"  target {words[met]}: {text}", style=colours[met]) for text, met in bars(row, ceilings)]


def _figures(row: Row, name: str, one: Result, ceilings: Ceilings) -> dict[str, str]:
    if one.ms is None:
        return {}
    seconds = one.ms / 1e3
    found = {
        "ms": f"{one.ms:.3f}",
        "of ceiling": f"{ceilings.share(row.bytes, row.flops, one.ms):.0%}",
        "error": f"{one.error:.1e}",
    }
    if row.bytes:
        rate = row.bytes / seconds / 1e9
        found["GB/s"] = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    if row.flops:
        found["TFLOP/s"] = f"{row.flops / seconds / 1e12:.1f}"
    if one.extra is not None:
        found["memory"] = _size(one.extra)
    ratio = row.ratio(name) if name != OURS else row.ratio(*row.peers())
    if ratio is not None:
        found["Strata vs"] = f"{ratio:.2f} x" if name != OURS else f"{ratio:.2f} x best"
    return found


def bars(row: Row, ceilings: Ceilings) -> list[tuple[str, bool | None]]:
    """Description of each target, and whether it is met; None if a contender it needs did not run."""
    found: list[tuple[str, bool | None]] = []
    for bar in row.case.bars:
        reached = row.reached(bar, ceilings)
        text = f"{bar.of} not measured" if reached is None else f"{bar.of} {_amount(reached, bar.of)}"
        found.append((f"{text}, target {_amount(bar.least, bar.of)}", None if reached is None else reached >= bar.least))
    if row.case.memory_limit is not None and row.ours.extra is not None:
        text = f"{_size(row.ours.extra)} extra memory, allowed {_size(row.case.memory_limit)}"
        found.append((text, row.ours.extra <= row.case.memory_limit))
    return found


def _amount(value: float, of: str) -> str:
    if of in ("copy", "matmul"):
        return f"{value:.1%}"
    return f"{value:.0f}" if of == "TFLOP/s" else f"{value:.3g} x"


def overhead_table(outcome: Outcome) -> Table:
    result = Table("call on tiny tensors", box=None, header_style="bold", pad_edge=False)
    result.add_column("host µs", justify="right")
    for name, microseconds in outcome.overhead.items():
        result.add_row(name, f"{microseconds:.1f}")
    return result


def as_json(outcome: Outcome) -> dict[str, Any]:
    header = benchmark_record.header("kernels")
    return {
        **header,
        "machine": header["machine"] | device_facts(outcome.device),
        "copy_bytes_per_s": outcome.ceilings.copy,
        "matmul_flops_per_s": outcome.ceilings.matmul,
        "cases": [row_as_json(row, outcome.ceilings) for row in outcome.rows],
        "host_microseconds": dict(outcome.overhead),
    }


def row_as_json(row: Row, ceilings: Ceilings) -> dict[str, Any]:
    return {
        "op": row.case.op,
        "case": row.case.name,
        "bytes": row.bytes,
        "flops": row.flops,
        "tolerance": row.tolerance,
        "trouble": row.trouble,
        "ratio_to_best_peer": row.ratio(*row.peers()),
        "bars": [
            {"least": bar.least, "of": bar.of, "reached": reached, "met": None if reached is None else reached >= bar.least}
            for bar in row.case.bars
            for reached in [row.reached(bar, ceilings)]
        ],
        "memory_limit": row.case.memory_limit,
        "contenders": {
            name: {
                "ms": one.ms,
                "rounds_ms": list(one.times),
                "of_ceiling": None if one.ms is None else ceilings.share(row.bytes, row.flops, one.ms),
                "relative_error": one.error,
                "extra_bytes": one.extra,
                "trouble": one.trouble,
                "ratio": None if name == OURS else row.ratio(name),
            }
            for name, one in row.results.items()
        },
    }


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_gib": properties.total_memory / 2**30,
        "cuda": torch.version.cuda,
    }


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"
