"""Roofline plot: arithmetic intensity and speed of every case and contender, under the ceilings of the run."""

from pathlib import Path

from strata.kernels.bench.case import OURS
from strata.kernels.bench.report import Outcome

MARKERS = "ov^sDPX*<>"


def draw(outcome: Outcome, path: Path) -> None:
    """Draws the plot. Operations that count only bytes are placed side by side on the left, where only the distance to the line
    is meaningful."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    copy, matmul = outcome.ceilings.copy, outcome.ceilings.matmul
    figure, axes = pyplot.subplots(figsize=(11, 7), layout="constrained")
    intensities = [2.0**-3, matmul / copy, 2.0**14]
    axes.plot(intensities, [min(copy * one, matmul) / 1e12 for one in intensities], color="black", linewidth=1)
    axes.annotate(f"copy {copy / 1e12:.2f} TB/s", (8, copy * 8 / 1e12), ha="right", va="bottom")
    axes.annotate(f"matmul {matmul / 1e12:.3g} TFLOP/s", (intensities[-1], matmul / 1e12), ha="right", va="bottom")
    ops = list(dict.fromkeys(row.case.op for row in outcome.rows))
    contenders = list(dict.fromkeys(name for row in outcome.rows for name, one in row.results.items() if one.times))
    colours = {op: f"C{number}" for number, op in enumerate(ops)}
    markers = {name: MARKERS[number % len(MARKERS)] for number, name in enumerate(contenders)}
    movers = list(dict.fromkeys(row.case.op for row in outcome.rows if not row.flops))
    for row in outcome.rows:
        flops = row.flops or row.bytes * 2.0 ** (movers.index(row.case.op) - 2)
        for name, one in row.results.items():
            if one.ms is None or not row.bytes:
                continue
            ours = name == OURS
            axes.scatter(
                flops / row.bytes,
                flops / (one.ms / 1e3) / 1e12,
                marker=markers[name],
                s=70 if ours else 35,
                facecolors=colours[row.case.op] if ours else "none",
                edgecolors=colours[row.case.op],
                zorder=3 if ours else 2,
            )
    for op in ops:
        axes.scatter([], [], color=colours[op], label=op)
    for name in contenders:
        axes.scatter([], [], color="grey", marker=markers[name], label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axes.set_title("Kernels under the ceilings measured in the same run")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
