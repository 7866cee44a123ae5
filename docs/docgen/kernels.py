"""Tables of `strata bench kernels`, one for each operation."""

from itertools import groupby
from typing import Any

from docgen.markdown import bold, duration, size, table
from docgen.record import Run

OURS = "strata"


def kernels(run: Run) -> str:
    bars = [met for case in run["cases"] for met in _verdicts(case)]
    ceilings = f"copy {run['copy_bytes_per_s'] / 1e9:,.0f} GB/s, matrix product {run['matmul_flops_per_s'] / 1e12:,.0f} TFLOP/s"
    summary = f"Ceilings measured in the run: {ceilings}. Bars: {bars.count(True)} met, {bars.count(False)} missed"
    summary += f", {bars.count(None)} not measured." if None in bars else "."
    tables = [operation(op, list(cases)) for op, cases in groupby(run["cases"], key=lambda case: case["op"])]
    legend = "Ratios are our speed over the peer's: above 1, ours is faster. A missed bar is **bold**."
    return "\n\n".join([summary, legend, *tables])


def operation(op: str, cases: list[dict[str, Any]]) -> str:
    """Table of one operation: time, rate and ratio to every peer, by case."""
    peers = list(dict.fromkeys(name for case in cases for name in _peers(case)))
    columns = (f"`{op}`", "time", "rate", "of ceiling", *(f"÷ {peer}" for peer in peers))
    rows = [(case["case"], *_ours(case), *(_ratio(case, peer) for peer in peers)) for case in cases]
    extra = [f"{case['case']}: {text}." for case in cases if (text := _memory(case))]
    return "\n\n".join([table(columns, rows, numeric=1), *extra])


def _verdicts(case: dict[str, Any]) -> list[bool | None]:
    """Verdicts on the bars, and on the memory limit where the operation has one."""
    extra, limit = case["contenders"].get(OURS, {}).get("extra_bytes"), case["memory_limit"]
    memory = [] if limit is None or extra is None else [bool(extra <= limit)]
    return [bar["met"] for bar in case["bars"]] + memory


def _peers(case: dict[str, Any]) -> list[str]:
    return [name for name, one in case["contenders"].items() if name != OURS and one.get("ratio") is not None]


def _ours(case: dict[str, Any]) -> tuple[str, str, str]:
    ours, bars = case["contenders"].get(OURS, {}), {bar["of"]: bar for bar in case["bars"]}
    if ours.get("ms") is None:
        return "**failed**", "-", "-"
    ceiling = bars.get("copy") or bars.get("matmul")
    share = "-" if ours.get("of_ceiling") is None else f"{ours['of_ceiling']:.0%}"
    return duration(ours["ms"]), rate(case), bold(share, ceiling is not None and ceiling["met"] is False)


def rate(case: dict[str, Any]) -> str:
    """TFLOP/s of what is limited by products, else GB/s."""
    seconds = case["contenders"][OURS]["ms"] / 1e3
    missed = any(bar["of"] == "TFLOP/s" and bar["met"] is False for bar in case["bars"])
    if case["flops"] and case["op"] in ("flash_attention", "linear_cross_entropy"):
        return bold(f"{case['flops'] / seconds / 1e12:,.0f} TFLOP/s", missed)
    return f"{case['bytes'] / seconds / 1e9:,.0f} GB/s" if case["bytes"] else "-"


def _ratio(case: dict[str, Any], peer: str) -> str:
    found = case["contenders"].get(peer, {}).get("ratio")
    if found is None:
        return "-"
    missed = any(bar["of"] == peer and bar["met"] is False for bar in case["bars"])
    return bold(f"{found:.3f}" if 0.99 < found < 1 else f"{found:.2f}", missed)


def _memory(case: dict[str, Any]) -> str:
    extra, limit = case["contenders"].get(OURS, {}).get("extra_bytes"), case["memory_limit"]
    if limit is None or extra is None:
        return ""
    return bold(f"{size(extra)} of memory beside inputs and outputs, {size(limit)} allowed", extra > limit)
