"""Tables, code excerpts and the picture of docs/kernel-ladder.md.

An excerpt stands between `<!-- code: FILE TEXT -->` and `<!-- end -->`: the block of FILE that begins at the first line with
TEXT.
"""

import io
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

from docgen.markdown import duration, table
from docgen.record import Run

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"(<!-- code: (\S+) (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
LANGUAGES = {".cu": "cpp", ".py": "python"}
PICTURE = ROOT / "docs" / "kernel-ladder.svg"
CUBLAS = "cuBLAS"
COLOURS = {"CUDA C++": "#e39a3b", "Triton": "#5b8fc7", "Gluon": "#4b9b6e"}


def matmul(run: Run) -> str:
    """Rates of every step, by shape, and shares of cuBLAS in the same run."""
    cases = run["cases"]
    columns = ["step", "language", *(text for case in cases for text in (f"{_sides(case)}, time", "TFLOP/s", "of cuBLAS"))]
    rows = []
    for name, described in cases[0]["steps"].items():
        cells = [cell for case in cases for cell in _cells(case["steps"][name])]
        rows.append([f"`{name}`" if name != CUBLAS else name, described.get("language", ""), *cells])
    troubles = [
        f"`{name}`, {_sides(case)}: {one['trouble']}." for case in cases for name, one in case["steps"].items() if one["trouble"]
    ]
    return "\n\n".join([table(columns, rows, numeric=2), *troubles])


def _sides(case: dict[str, Any]) -> str:
    sides = [case[side] for side in ("rows", "columns", "inner")]
    return f"{sides[0]}³" if len(set(sides)) == 1 else " x ".join(map(str, sides))


def _cells(one: dict[str, Any]) -> tuple[str, str, str]:
    if one["ms"] is None:
        return "**failed**", "-", "-"
    time = f"{one['ms']:,.0f} ms" if one["ms"] >= 100 else duration(one["ms"])
    return time, _rate(one["tflops"]), "-" if one["of_cublas"] is None else f"{one['of_cublas']:.1%}"


def _rate(tflops: float) -> str:
    return f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.2f}"


def stages(run: Run) -> str:
    """Machine code of each step: products, loads, registers, shared memory, spills."""
    columns = ("step", "products", "loads", "registers", "shared memory", "spills", "instructions")
    rows = [
        (
            f"`{kernel['step']}`",
            _counted(kernel["tensor_cores"]) or "fp32 multiply-adds",
            _loads(kernel),
            f"{kernel['registers']} x {32 * kernel['warps']}",
            f"{kernel['shared'] / 1024:.0f} KiB" if kernel["shared"] else "-",
            f"{kernel['stack']} bytes" if kernel["stack"] or kernel["spilled"] else "none",
            f"{kernel['instructions']:,}",
        )
        for kernel in run["kernels"]
    ]
    legend = "Counts are of instructions in the binary, loops counted once. Registers are per thread, times threads of a block."
    return "\n\n".join([legend, table(columns, rows, numeric=3)])


def _counted(named: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in named.items() if count)


def _loads(kernel: dict[str, Any]) -> str:
    """The ways in which operands reach the block: TMA, asynchronous copies, loads into registers by width."""
    ways = [f"{kernel['tma']['loads']} TMA"] if kernel["tma"]["loads"] else []
    ways += [f"{kernel['async_copies']} cp.async"] if kernel["async_copies"] else []
    return ", ".join(ways + [f"{count} x {width} bits" for width, count in kernel["loads"].items()])


def excerpt(path: Path, text: str) -> str:
    """The first line with `text` and the lines of its block: those indented deeper, and the line that closes it."""
    lines = path.read_text().splitlines()
    start = next((number for number, line in enumerate(lines) if text in line), None)
    if start is None:
        raise ValueError(f"{path} has no line with '{text}'")
    depth, end = _depth(lines[start]), start + 1
    while end < len(lines) and (
        not lines[end].strip()
        or _depth(lines[end]) > depth
        or (_depth(lines[end]) == depth and lines[end].lstrip().startswith((")", "}")))
    ):
        end += 1
    return dedent("\n".join(lines[start:end])).rstrip()


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def fill(page: str) -> str:
    """The page with its excerpts as they are in the sources."""

    def filled(found: re.Match[str]) -> str:
        begin, name, text, end = found.groups()
        path = ROOT / name
        return f"{begin}```{LANGUAGES[path.suffix]}\n{excerpt(path, text)}\n```\n{end}"

    return CODE.sub(filled, page)


def pictures(load: Callable[[str], Run]) -> dict[Path, str]:
    return {PICTURE: picture(load("matmul-h200"))}


def picture(run: Run) -> str:
    """SVG: shares of cuBLAS on the left; rates over operations per byte read, under the run's ceilings, on the right."""
    import matplotlib
    from matplotlib.figure import Figure

    case = run["cases"][0]
    steps = {name: one for name, one in case["steps"].items() if name != CUBLAS and one["ms"] is not None}
    top, copy = case["steps"][CUBLAS]["tflops"], run["copy_bytes_per_s"] / 1e12
    with matplotlib.rc_context({"svg.hashsalt": "strata", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        shares, roof = figure.subplots(1, 2, width_ratios=(1.1, 1))
        colours = [COLOURS[one["language"]] for one in steps.values()]
        labels = [f"{number} {name}" for number, name in enumerate(steps, 1)]
        bars = shares.barh(labels, [100 * one["of_cublas"] for one in steps.values()], color=colours)
        shares.bar_label(bars, [f"{one['of_cublas']:.1%}" for one in steps.values()], padding=3)
        shares.invert_yaxis()
        shares.axvline(100, color="black", linewidth=0.8)
        shares.set(xlabel=f"percent of cuBLAS, {_sides(case)}", xlim=(0, 118))
        for language, colour in COLOURS.items():
            shares.barh(labels[:1], [0], color=colour, label=language)
        shares.legend(loc="upper right", frameon=False)
        lowest = min([one["tflops"] for one in steps.values()], default=1.0)
        intensities = [0.25, top / copy, 2048.0]
        roof.plot(intensities, [min(copy * one, top) for one in intensities], color="black", linewidth=0.8)
        roof.annotate(f"memory, {copy:.1f} TB/s", (3, copy * 3), rotation=41, ha="center", va="bottom", fontsize=8)
        roof.annotate(f"cuBLAS, {top:.0f} TFLOP/s", (2000, top), ha="right", va="bottom", fontsize=8)
        for number, (one, colour) in enumerate(zip(steps.values(), colours, strict=True), 1):
            place = (one["intensity"], one["tflops"])
            roof.scatter(*place, color=colour, s=18, zorder=3)
            side, offset = ("left", 5) if number % 2 else ("right", -5)  # neighbours have similar rates
            roof.annotate(str(number), place, (offset, 0), textcoords="offset points", ha=side, va="center", fontsize=8)
        roof.set(xscale="log", yscale="log", xlim=(0.25, 2048), ylim=(lowest / 2, 3 * top))
        roof.set(xlabel="operations per byte that a block of threads reads", ylabel="TFLOP/s")
        roof.grid(alpha=0.3)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
