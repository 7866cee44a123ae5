"""Report of a quantization: a table for the terminal, and `quantization.json` beside the weights."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strata.platform import benchmark_record
from strata.platform.files import write_atomic
from strata.training.deployment.report import readable
from strata.training.quantization.layers import Plan
from strata.training.quantization.quality import Agreement
from strata.training.quantization.rows import TokenRows

NAME = "quantization.json"


@dataclass(frozen=True)
class Side:
    perplexity: float
    weights_bytes: int


@dataclass(frozen=True)
class Report:
    source: str
    plan: Plan
    rows: TokenRows
    seed: int
    before: Side
    after: Side
    agreement: Agreement
    greedy_tokens: int

    @property
    def perplexity_change(self) -> float:
        return self.after.perplexity / self.before.perplexity - 1

    @property
    def size_ratio(self) -> float:
        return self.after.weights_bytes / self.before.weights_bytes

    def values(self) -> dict[str, Any]:
        plan, rows = self.plan, self.rows
        calibrated = plan.format.calibrated
        return benchmark_record.header("quantize") | {
            "source": self.source,
            "format": plan.format.name,
            "method": plan.format.method,
            "group_size": plan.group_size,
            "layers": {"quantized": len(plan.quantized), "left": list(plan.left)},
            "calibration": {
                "data": rows.origin,
                "rows": len(rows.calibration) if calibrated else 0,
                "tokens": rows.calibration[:, 1:].size if calibrated else 0,
                "seed": self.seed,
            },
            "held_out": {"rows": len(rows.held_out), "tokens": rows.held_out[:, 1:].size},
            "before": asdict(self.before),
            "after": asdict(self.after),
            "perplexity_change": self.perplexity_change,
            "size_ratio": self.size_ratio,
            "greedy": asdict(self.agreement) | {"compared_tokens": self.greedy_tokens},
        }


def write(report: Report, folder: Path) -> None:
    write_atomic(folder / NAME, json.dumps(report.values(), indent=2))


def show(report: Report, console: Console) -> None:
    table = Table("", "before", "after", "change", box=None, header_style="bold")
    before, after = report.before, report.after
    table.add_row("perplexity", f"{before.perplexity:.4g}", f"{after.perplexity:.4g}", f"{report.perplexity_change:+.2%}")
    sizes = [readable(side.weights_bytes) for side in (before, after)]
    table.add_row("weights", *sizes, f"{report.size_ratio:.2f} x")
    table.add_row("greedy tokens equal", "", f"{report.agreement.tokens:.1%}", f"of {report.greedy_tokens}")
    table.add_row("continuations equal", "", f"{report.agreement.prompts:.1%}", "")
    console.print(table)
