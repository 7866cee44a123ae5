"""Pictures of a profile as SVG: bars of causes, a timeline of one step, a roofline, allocated memory.

Colours are classes of the page's stylesheet, so that they follow its light and dark scheme. Every mark has a title, which
browsers show and screen readers speak.
"""

import math
from collections.abc import Sequence
from html import escape

from strata.training.profile.analysis.roofline import Point
from strata.training.profile.analysis.summary import RankSummary

WIDTH, ROW, LABEL = 960, 26, 90
CAUSES = (
    "products", "attention", "scores", "loss", "other work", "optimizer", "recomputation", "dispatch", "between phases", "data",
    "host reads", "allocation", "garbage collection", "gradient reduction", "exposed collectives", "waiting for other ranks",
)  # fmt: skip
PHASES = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint")
MOST_MARKS = 4000  # of a timeline; shorter ones are left out first


def colour(name: str, names: Sequence[str] = CAUSES) -> str:
    return f"c{names.index(name) % 16}" if name in names else "c15"


def bars(ranks: Sequence[RankSummary], exposed: float) -> str:
    """One bar per rank: the causes of its typical step."""
    rows = []
    for rank in ranks:
        causes = {**rank.seconds, "exposed collectives": exposed, "waiting for other ranks": rank.waiting}
        rows.append((f"rank {rank.rank}", [(name, causes[name]) for name in CAUSES if causes.get(name, 0.0) > 0]))
    longest = max(sum(seconds for _, seconds in row) for _, row in rows) or 1.0
    scale, marks = (WIDTH - LABEL) / longest, []
    for at, (label, row) in enumerate(rows):
        marks.append(f'<text x="0" y="{at * ROW + 17}">{label}</text>')
        x = float(LABEL)
        for name, seconds in row:
            marks.append(
                _box(x, at * ROW + 3, seconds * scale, ROW - 6, colour(name), f"{label}: {name} {seconds * 1e3:,.2f} ms")
            )
            x += seconds * scale
    return _picture("Time of a step by cause, for each rank", WIDTH, len(rows) * ROW, marks)


def timeline(ranks: Sequence[RankSummary]) -> str:
    """Phases and exchanges of the last profiled step of each rank, from its own beginning."""
    chosen = [(rank, rank.trace.steps()[-1]) for rank in ranks]
    scale = (WIDTH - LABEL) / max(step.seconds for _, step in chosen)
    marks = []
    for at, (rank, step) in enumerate(chosen):
        marks.append(f'<text x="0" y="{at * ROW + 17}">rank {rank.rank}</text>')
        inside = [step]
        boxes = []
        while inside:
            event = inside.pop()
            name = event.range or ""
            if name in PHASES or name.startswith(("collective ", "wait ", "gc ")):
                kind = colour(name, PHASES) if name in PHASES else "c12" if name.startswith("gc ") else "c14"
                y, height = (at * ROW + 3, ROW - 6) if name in PHASES else (at * ROW + 9, ROW - 18)
                x = LABEL + (event.begin - step.begin) * scale
                title = f"rank {rank.rank}: {name} {event.seconds * 1e3:,.2f} ms"
                boxes.append((name not in PHASES, event.seconds, _box(x, y, event.seconds * scale, height, kind, title)))
            if event.kind != "cpu_op" or event.children:
                inside.extend(event.children)
        boxes.sort(key=lambda box: -box[1])
        marks += [text for _, _, text in sorted(boxes[:MOST_MARKS], key=lambda box: box[0])]
    return _picture("Phases of one step, with exchanges drawn inside them", WIDTH, len(chosen) * ROW, marks)


def legend(names: Sequence[str], known: Sequence[str] = CAUSES) -> str:
    items = (f'<li><span class="key {colour(name, known)}"></span>{escape(name)}</li>' for name in names)
    return f'<ul class="legend">{"".join(items)}</ul>'


def roofline(points: Sequence[Point], peak: float, bandwidth: float | None) -> str:
    """Rate over arithmetic intensity, both logarithmic. A circle's area is its time."""
    height, pad = 300, 40
    intensities = [point.intensity for point in points] + ([peak / bandwidth] if bandwidth else [])
    left, right = math.log10(min(intensities)) - 0.3, math.log10(max(intensities)) + 0.3
    top = math.log10(max(peak, *(point.rate for point in points))) + 0.2
    bottom = min(top - 2, math.log10(min(point.rate for point in points)) - 0.2)

    def x(intensity: float) -> float:
        return pad + (math.log10(intensity) - left) / (right - left) * (WIDTH - 2 * pad)

    def y(rate: float) -> float:
        return (top - math.log10(rate)) / (top - bottom) * (height - pad)

    marks = []
    ridge = max(peak / bandwidth, 10**left) if bandwidth else 10**left
    if bandwidth:
        marks.append(f'<line class="roof" x1="{pad}" y1="{y(bandwidth * 10**left):.1f}" x2="{x(ridge):.1f}" y2="{y(peak):.1f}"/>')
    marks.append(f'<line class="roof" x1="{x(ridge):.1f}" y1="{y(peak):.1f}" x2="{WIDTH - pad}" y2="{y(peak):.1f}"/>')
    marks.append(f'<text x="{WIDTH - pad - 160}" y="{y(peak) - 5:.1f}">peak {peak / 1e12:,.3g} TFLOP/s</text>')
    most = max(point.seconds for point in points)
    for point in sorted(points, key=lambda each: -each.seconds):
        rate, time = f"{point.rate / 1e12:,.3g} TFLOP/s, {point.intensity:,.0f} FLOP/B", f"{point.seconds * 1e3:,.2f} ms per step"
        title = f"{point.name}: {rate}, {time}"
        radius = 3 + 11 * math.sqrt(point.seconds / most)
        centre = f'cx="{x(point.intensity):.1f}" cy="{y(point.rate):.1f}" r="{radius:.1f}"'
        marks.append(
            f'<circle class="{"c1" if "attention" in point.name else "c0"}" {centre}><title>{escape(title)}</title></circle>'
        )
    marks.append(f'<text x="{pad}" y="{height - 8}">FLOP per byte, from {10**left:,.0f} to {10**right:,.0f}</text>')
    return _picture("Roofline: rates of products and attention over their intensity", WIDTH, height, marks)


def memory(points: Sequence[tuple[float, int]]) -> str:
    """Allocated bytes over the profiled steps, the peak of each of at most as many moments as the picture is wide."""
    height = 160
    first, last = points[0][0], points[-1][0]
    most = max(size for _, size in points) or 1
    peaks: dict[int, int] = {}
    for at, size in points:
        column = round((at - first) / ((last - first) or 1) * WIDTH)
        peaks[column] = max(peaks.get(column, 0), size)
    path = " ".join(f"{column},{height - max(size, 0) / most * (height - 20):.1f}" for column, size in sorted(peaks.items()))
    line = f'<polyline class="line" points="{path}"/><text x="4" y="14">peak {most / 2**20:,.0f} MiB</text>'
    return _picture(f"Allocated memory over {last - first:.2f} s", WIDTH, height, [line])


def _box(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    size = f'x="{x:.1f}" y="{y}" width="{max(width, 0.3):.1f}" height="{height}"'
    return f'<rect class="{kind}" {size}><title>{escape(title)}</title></rect>'


def _picture(label: str, width: int, height: int, marks: Sequence[str]) -> str:
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}">{"".join(marks)}</svg>'
