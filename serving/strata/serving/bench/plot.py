"""Plots throughput, TTFT and ITL over the load, a line per contender."""

from collections.abc import Callable
from io import BytesIO

from strata.serving.bench.clients.load import Level
from strata.serving.bench.clients.measure import Summary
from strata.serving.bench.results import Results, Settings

Read = Callable[[Summary], float | None]
PANELS: dict[str, list[tuple[str, Read]]] = {
    "output throughput, tokens/s": [("-", lambda summary: summary.tokens_per_s)],
    "TTFT p50, ms": [("-", lambda summary: _ms(summary.ttft_p50))],
    "ITL p50 (solid) and p99 (dashed), ms": [
        ("-", lambda summary: _ms(summary.itl_p50)),
        ("--", lambda summary: _ms(summary.itl_p99)),
    ],
}


def draw(settings: Settings, results: Results) -> bytes:
    """A PNG with a row of panels for closed loops and for Poisson loads, and a row per kind of request if there are several."""
    from matplotlib.figure import Figure

    loads = {
        "concurrency": [level for level in settings.levels if level.concurrency],
        "request rate, requests/s": [level for level in settings.levels if level.rate],
    }
    kinds = sorted({kind for ran in results.ran.values() for one in ran.measured for kind in one.kinds}) or [""]
    rows = [(load, levels, kind) for load, levels in loads.items() if levels for kind in kinds]
    figure = Figure(figsize=(15, 4.5 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(PANELS), squeeze=False)
    for (load, levels, kind), axes in zip(rows, grid, strict=True):
        for (title, lines), axis in zip(PANELS.items(), axes, strict=True):
            for number, contender in enumerate(results.ran):
                for style, read in lines:
                    points = _points(results, contender, levels, kind, read)
                    label = contender if style == "-" else None
                    axis.plot(*zip(*points, strict=True), style, marker="o", color=f"C{number}", label=label)
            named = f"{kind}: {title}" if kind else title
            axis.set(title=named, xlabel=load, xscale="log", yscale="log" if "ms" in title else "linear")
            if "ms" not in title:
                axis.set_ylim(bottom=0)
            axis.set_xticks([level.concurrency or level.rate for level in levels], labels=[_tick(level) for level in levels])
            axis.xaxis.minorticks_off()
            axis.grid(alpha=0.3)
    grid[0][0].legend()
    output = BytesIO()
    figure.savefig(output, format="png", dpi=120)
    return output.getvalue()


def _points(results: Results, contender: str, levels: list[Level], kind: str, read: Read) -> list[tuple[float, float]]:
    points = []
    for level in levels:
        one = results.at(contender, level)
        summary = (one.kinds.get(kind) if kind else one.summary) if one else None
        value = read(summary) if summary else None
        points.append((level.concurrency or level.rate or 0.0, float("nan") if value is None else value))
    return points


def _tick(level: Level) -> str:
    return f"{level.concurrency or level.rate:g}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
