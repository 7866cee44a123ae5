"""Plots of a plan. Functions import matplotlib when called, so a plan without plots starts without it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.planner.cli.report import columns
from strata.planner.pipeline.simulate import simulate
from strata.planner.plan import TrainingPlan
from strata.planner.units import show

if TYPE_CHECKING:
    from strata.planner.step.step import Step

# Okabe and Ito's colour-blind safe palette.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
KINDS = {"compute": COLOURS[0], "communication": COLOURS[1], "idle": "#8a8a8a"}
MOST_LABELS = 12
TIMELINE_ROUNDS = 3  # micro-batches per stage: enough for the start, part of the steady state, and the end


@dataclass(frozen=True)
class Choice:
    """A layout as a point of a plot."""

    gpus: int
    days: float
    dollars: float


def draw(plan: TrainingPlan, folder: Path) -> list[Path]:
    memory(plan, folder / "memory.png")
    step_time(plan.step, folder / "step.png", f"{plan.shape.name} on {plan.layout.gpus:,} {plan.gpu.name}")
    paths = [folder / "memory.png", folder / "step.png"]
    if plan.layout.pipeline > 1:
        timeline(plan, folder / "timeline.png")
        paths.append(folder / "timeline.png")
    return paths


def memory(plan: TrainingPlan, path: Path) -> None:
    """Stacked bar per stage, with the memory of the GPU as a line."""
    from matplotlib.ticker import MaxNLocator

    stages = plan.memory.stages
    figure, axes = _figure(max(6.5, min(14, 4 + 0.5 * len(stages))), 4.8)
    numbers, bottoms = range(len(stages)), [0.0] * len(stages)
    shares = [columns(stage) for stage in stages]
    names = [name for name in shares[0] if name != "host" and any(share[name] for share in shares)]
    for name, colour in zip(names, COLOURS, strict=False):
        heights = [share[name] / 2**30 for share in shares]
        axes.bar(numbers, heights, bottom=bottoms, width=0.72, color=colour, label=name, edgecolor="white", linewidth=0.5)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    capacity = plan.memory.capacity / 2**30
    axes.axhline(capacity, color="#222222", linestyle="--", linewidth=1.2)
    axes.text(
        1.01, capacity, f"{plan.gpu.name}\n{capacity:.1f} GiB", transform=axes.get_yaxis_transform(), va="center", fontsize=9
    )
    if len(stages) <= 16:
        for number, height in zip(numbers, bottoms, strict=True):
            axes.text(number, height, f"{height:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set(xlabel="pipeline stage", ylabel="GiB of a GPU", ylim=(0, 1.08 * max(capacity, *bottoms)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.set_xlim(-0.6, len(stages) - 0.4)
    axes.set_title(f"{plan.shape.name}: {'fits' if plan.memory.fits else 'does not fit'}", loc="left")
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), frameon=False, fontsize=9)
    _save(figure, path)


def step_time(step: "Step", path: Path, title: str) -> None:
    """Waterfall plot of a step: each bar begins where the previous bar ends."""
    from matplotlib.patches import Patch

    rows = [(name, seconds) for name, seconds in step.spent.items() if abs(seconds) >= 0.0005 * step.seconds]
    figure, axes = _figure(9, 1.4 + 0.42 * (len(rows) + 1))
    begun = 0.0
    for number, (name, seconds) in enumerate(rows):
        axes.barh(number, seconds, left=begun, color=KINDS[_kind(name)], height=0.68)
        low, high = sorted((begun, begun + seconds))
        beside = {"x": high, "ha": "left"} if high < 0.75 * step.seconds else {"x": low, "ha": "right"}
        axes.text(y=number, s=f" {show(seconds, 's')}, {seconds / step.seconds:.1%} ", va="center", fontsize=9, **beside)
        begun += seconds
    axes.barh(len(rows), step.seconds, color="#222222", height=0.68)
    axes.text(0.01 * step.seconds, len(rows), show(step.seconds, "s"), color="white", va="center", fontsize=9)
    axes.set_yticks(range(len(rows) + 1), [name for name, _ in rows] + ["step"])
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, step.seconds * 1.02))
    axes.set_title(f"{title}: {show(step.seconds, 's')} a step, MFU {step.mfu:.1%}", loc="left")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    used = dict.fromkeys(_kind(name) for name, _ in rows)
    figure.legend(
        handles=[Patch(color=KINDS[kind], label=kind) for kind in used],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    _save(figure, path)


def _kind(name: str) -> str:
    if "bubble" in name:
        return "idle"
    return "communication" if any(word in name for word in ("parallelism", "gathered", "embedding")) else "compute"


def timeline(plan: TrainingPlan, path: Path) -> None:
    """Pipeline timeline of the first micro-batches. More of them would only lengthen the steady state."""
    from strata.planner.pipeline import timeline as picture

    layout = plan.layout
    held = len(plan.step.times.forward) // layout.pipeline
    shown = min(layout.micro_batches, TIMELINE_ROUNDS * layout.pipeline)
    played = simulate(layout.schedule, layout.pipeline, shown, held, plan.step.times)
    of = f"{shown} of {layout.micro_batches:,}" if shown < layout.micro_batches else f"{shown}"
    picture.draw(played, path, f"{layout.schedule}, {layout.pipeline} stages, {of} micro-batches")


def pareto(every: list[Choice], front: list[Choice], path: Path, title: str) -> None:
    """Scatter plot of days and dollars, with the Pareto front. Other layouts are grey."""
    figure, axes = _figure(8.5, 5.2)
    axes.scatter(
        [one.days for one in every], [one.dollars for one in every], s=9, color="#c4c4c4", label="other layouts", zorder=1
    )
    ordered = sorted(front, key=lambda one: one.days)
    line = [one.days for one in ordered], [one.dollars for one in ordered]
    axes.plot(*line, "o-", color=COLOURS[0], markersize=5, linewidth=1.4, label="Pareto front", zorder=2)
    for one in _spread(ordered):
        label = f"{one.gpus:,} GPUs"
        axes.annotate(label, (one.days, one.dollars), (6, 6), textcoords="offset points", fontsize=8, zorder=3)
    _label_days(axes.xaxis, [one.days for one in every])
    _label_dollars(axes.yaxis, [one.dollars for one in every])
    axes.grid(alpha=0.3)
    axes.set_title(title, loc="left")
    axes.margins(0.12)
    axes.legend(frameon=False)
    _save(figure, path)


def cost_against_gpus(best: list[Choice], path: Path, title: str) -> None:
    """Dollars and days of the best layout by GPU count."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ordered = sorted(best, key=lambda one: one.gpus)
    figure, (above, below) = _figure(8.5, 6, rows=2)
    gpus = [one.gpus for one in ordered]
    above.plot(gpus, [one.dollars for one in ordered], "o-", color=COLOURS[5])
    below.plot(gpus, [one.days for one in ordered], "s-", color=COLOURS[0])
    _label_dollars(above.yaxis, [one.dollars for one in ordered])
    _label_days(below.yaxis, [one.days for one in ordered])
    for axes in (above, below):
        axes.grid(alpha=0.3)
    below.set_xscale("log")
    below.xaxis.set_major_locator(FixedLocator(gpus if len(gpus) <= MOST_LABELS else gpus[:: len(gpus) // MOST_LABELS + 1]))
    below.xaxis.set_minor_locator(NullLocator())
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    below.set_xlabel("GPUs")
    above.set_title(title, loc="left")
    _save(figure, path)


WIDE = 5  # ratio of the largest to the smallest value from which an axis is logarithmic


def _label_days(axis: Any, values: list[float]) -> None:
    _label(axis, "days", values, lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:.3g}")


def _label_dollars(axis: Any, values: list[float]) -> None:
    _label(axis, "dollars", values, lambda value, _: f"${value / 1e6:,.4g}M" if value >= 1e6 else f"${value:,.0f}")


def _label(axis: Any, name: str, values: list[float], form: Callable[[float, object], str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if max(values) > WIDE * min(values):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(form))
    axis.set_label_text(name)


def _spread(ordered: list[Choice]) -> list[Choice]:
    """At most MOST_LABELS choices, spread over the range."""
    if len(ordered) <= MOST_LABELS:
        return ordered
    return [ordered[round(number * (len(ordered) - 1) / (MOST_LABELS - 1))] for number in range(MOST_LABELS)]


def _figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True)
    for one in [axes] if rows == 1 else axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
