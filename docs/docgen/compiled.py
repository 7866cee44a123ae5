"""Table of `strata bench compile`."""

import statistics
from typing import Any

from docgen.markdown import bold, table
from docgen.record import Run

NAMES = {
    "strata": 'backend="strata"',
    "inductor": "Inductor",
    "liger": "Liger-Kernel, Inductor",
    "inductor-causal": "Inductor, causal attention without a mask",
    "liger-causal": "Liger-Kernel, Inductor, causal attention without a mask",
    "eager": "not compiled",
}


def compiled(run: Run) -> str:
    of = run["settings"]
    rows = run["contenders"]
    ours = next((row["tokens_per_second"] for row in rows if row["contender"] == "strata" and not row["error"]), None)
    summary = f"{of['model']}, {of['batch']} sequences of {of['tokens']:,} tokens, median of {of['steps']} steps."
    columns = ("training step", "tokens/s", "step", "peak memory", "first step", "loss of first and last step", "ours ÷ this")
    parts = [summary, table(columns, [_row(row, ours) for row in rows], numeric=1)]
    if fused := next((row["fused"] for row in rows if row["contender"] == "strata"), None):
        parts.append("Put in by the backend: " + ", ".join(f"{count} `{op}`" for op, count in fused.items()) + ".")
    return "\n\n".join(parts)


def _row(row: dict[str, Any], ours: float | None) -> tuple[str, ...]:
    name = NAMES[row["contender"]]
    if row["error"]:
        return name, "**failed**", "-", "-", "-", "-", "-"
    ratio = ours / row["tokens_per_second"] if ours else None
    return (
        name,
        f"{row['tokens_per_second']:,.0f}",
        f"{statistics.median(row['seconds']) * 1e3:.1f} ms",
        f"{row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else "-",
        f"{row['first_step_seconds']:.0f} s",
        f"{row['loss']:.3f}, {row['last_loss']:.3f}",
        "-" if ratio is None else bold(f"{ratio:.2f}", ratio < 1),
    )
