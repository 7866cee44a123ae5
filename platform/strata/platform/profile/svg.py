"""Pictures of a profile as SVG: bars of causes, timelines, a roofline, memory over time.

Colours are classes of the page's stylesheet, so that they follow its light and dark scheme. Every mark has a title, which
browsers show and screen readers speak.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from strata.platform.profile.roofline import Point

WIDTH, ROW, LABEL = 960, 26, 90
COLOURS = 16
MOST_MARKS = 4000  # of a timeline's row; shorter ones are left out first


@dataclass(frozen=True)
class Mark:
    """A span of a timeline. One that is `inside` is drawn thinner, over the others."""

    name: str
    begin: float
    seconds: float
    colour: str
    inside: bool = False


def colour(name: str, names: Sequence[str]) -> str:
    return f"c{names.index(name) % COLOURS}" if name in names else f"c{COLOURS - 1}"


def bars(rows: Mapping[str, Mapping[str, float]], causes: Sequence[str], label: str) -> str:
    """One bar per row: its seconds by cause."""
    longest = max(sum(row.get(name, 0.0) for name in causes) for row in rows.values()) or 1.0
    scale, marks = (WIDTH - LABEL) / longest, []
    for at, (title, row) in enumerate(rows.items()):
        marks.append(f'<text x="0" y="{at * ROW + 17}">{escape(title)}</text>')
        x = float(LABEL)
        for name in causes:
            if (seconds := row.get(name, 0.0)) > 0:
                told = f"{title}: {name} {seconds * 1e3:,.2f} ms"
                marks.append(_box(x, at * ROW + 3, seconds * scale, ROW - 6, colour(name, causes), told))
                x += seconds * scale
    return _picture(label, WIDTH, len(rows) * ROW, marks)


def timeline(rows: Mapping[str, Sequence[Mark]], seconds: float, label: str) -> str:
    """One line per row. Marks begin at 0 to `seconds`."""
    scale, drawn = (WIDTH - LABEL) / (seconds or 1.0), []
    for at, (title, marks) in enumerate(rows.items()):
        drawn.append(f'<text x="0" y="{at * ROW + 17}">{escape(title)}</text>')
        longest = sorted(marks, key=lambda mark: -mark.seconds)[:MOST_MARKS]
        for mark in sorted(longest, key=lambda mark: mark.inside):
            y, height = (at * ROW + 9, ROW - 18) if mark.inside else (at * ROW + 3, ROW - 6)
            told = f"{title}: {mark.name} {mark.seconds * 1e3:,.2f} ms"
            drawn.append(_box(LABEL + mark.begin * scale, y, mark.seconds * scale, height, mark.colour, told))
    return _picture(label, WIDTH, len(rows) * ROW, drawn)


def legend(names: Sequence[str], known: Sequence[str]) -> str:
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


def line(points: Sequence[tuple[float, float]], label: str, peak: str) -> str:
    """A value over time, the highest of each of at most as many moments as the picture is wide. `peak` describes the highest."""
    height = 160
    first, last = points[0][0], points[-1][0]
    most = max(value for _, value in points) or 1
    peaks: dict[int, float] = {}
    for at, value in points:
        column = round((at - first) / ((last - first) or 1) * WIDTH)
        peaks[column] = max(peaks.get(column, 0.0), value)
    path = " ".join(f"{column},{height - max(value, 0) / most * (height - 20):.1f}" for column, value in sorted(peaks.items()))
    drawn = f'<polyline class="line" points="{path}"/><text x="4" y="14">{escape(peak)}</text>'
    return _picture(f"{label} over {last - first:.2f} s", WIDTH, height, [drawn])


def memory(points: Sequence[tuple[float, int]]) -> str:
    """Allocated bytes over time."""
    return line(points, "Allocated memory", f"peak {max(size for _, size in points) / 2**20:,.0f} MiB")


def _box(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    size = f'x="{x:.1f}" y="{y}" width="{max(width, 0.3):.1f}" height="{height}"'
    return f'<rect class="{kind}" {size}><title>{escape(title)}</title></rect>'


def _picture(label: str, width: int, height: int, marks: Sequence[str]) -> str:
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}">{"".join(marks)}</svg>'
