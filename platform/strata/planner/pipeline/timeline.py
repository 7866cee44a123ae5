"""Timeline of a pipeline schedule, as a figure and as terminal text."""

from pathlib import Path

from strata.planner.pipeline.schedules import Kind
from strata.planner.pipeline.simulate import Simulation

# The colours differ in hue and in lightness, so they can be distinguished in grey and by colour-blind readers.
COLOURS: dict[Kind, str] = {"F": "#5b8fc7", "BW": "#e39a3b", "B": "#cf6f86", "W": "#56a583"}
NAMES: dict[Kind, str] = {"F": "forward", "BW": "backward", "B": "backward of inputs", "W": "backward of weights"}
LETTERS: dict[Kind, str] = {"F": "F", "BW": "B", "B": "b", "W": "w"}

WIDTH = 16.0  # inches
DIGIT = 0.06  # inches of a digit that is just large enough to read


def draw(simulation: Simulation, path: Path, title: str) -> None:
    """A row a stage, with its micro-batches' numbers where they fit. Later chunks are paler; what runs as one block is framed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages, (scale, unit) = simulation.stages, _scale(simulation.total)
    figure = Figure(figsize=(WIDTH, 1.4 + max(0.18, min(0.42, 12 / stages)) * stages), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    inches = 0.88 * WIDTH / simulation.total  # that a second takes
    boxes, colours, frames = [], [], []
    for stage in range(stages):
        opened = 0.0
        for operation, start, end in simulation.placed(stage):
            boxes.append(_box(stage, start * scale, end * scale))
            colours.append(_paler(COLOURS[operation.kind], operation.chunk / max(2, simulation.interleave)))
            if operation.joined and operation.kind == "F":
                opened = start
            elif operation.joined:
                frames.append(_box(stage, opened * scale, end * scale))
            number, middle = str(operation.micro_batch), (start + end) / 2 * scale
            if (end - start) * inches > DIGIT * (len(number) + 0.5):
                axes.text(middle, stage, number, ha="center", va="center_baseline", fontsize=7, color="#222222")
    spacious = inches * simulation.total / max(len(order) for order in simulation.orders) > DIGIT
    idle = [_box(stage, 0.0, simulation.total * scale) for stage in range(stages)]
    axes.add_collection(PolyCollection(idle, facecolors="#ececec", zorder=0))
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white" if spacious else "face", linewidths=0.6))
    axes.add_collection(PolyCollection(frames, facecolors="none", edgecolors="#333333", linewidths=0.9))
    axes.set(xlim=(0, simulation.total * scale), ylim=(stages - 0.4, -0.6), xlabel=unit, ylabel="stage")
    every = max(1, stages // 16)
    axes.set_yticks(range(0, stages, every))
    held = axes.secondary_yaxis("right")
    held.set_yticks(range(0, stages, every), [f"{held:g}" for held in simulation.in_flight[::every]])
    held.set_ylabel("most micro-batches held", fontsize=9, labelpad=8)
    for side in (axes, held):
        side.spines[:].set_visible(False)
        side.tick_params(length=0)
    used = [kind for kind in COLOURS if any(operation.kind == kind for operation in simulation.orders[-1])]
    patches = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in used] + [Patch(color="#ececec", label="idle")]
    if frames:
        patches.append(Patch(facecolor="none", edgecolor="#333333", label="one block"))
    axes.set_title(f"{title}: {simulation.bubble:.1%} bubble", loc="left", fontsize=12)
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def as_text(simulation: Simulation, width: int) -> str:
    """A line a stage, `width` characters long: a letter and a number where an operation begins, dots where the stage idles."""
    label = len(f"stage {simulation.stages - 1} ")
    columns = width - label
    lines = []
    for stage in range(simulation.stages):
        cells = ["·"] * columns
        for operation, start, end in simulation.placed(stage):
            first, after = (round(time / simulation.total * columns) for time in (start, end))
            letter, width = LETTERS[operation.kind], after - first
            text = f"{letter}{operation.micro_batch}"
            cells[first:after] = text.ljust(width, "-") if len(text) <= width else letter * width
        lines.append(f"stage {stage}".ljust(label) + "".join(cells))
    used = {operation.kind for order in simulation.orders for operation in order}
    key = ", ".join(f"{LETTERS[kind]} {NAMES[kind]}" for kind in LETTERS if kind in used)
    scale, unit = _scale(simulation.total)
    lines.append(f"{simulation.total * scale:.4g} {unit}, {simulation.bubble:.1%} bubble; {key}, · idle")
    return "\n".join(lines)


def _box(stage: int, start: float, end: float) -> list[tuple[float, float]]:
    return [(start, stage - 0.43), (end, stage - 0.43), (end, stage + 0.43), (start, stage + 0.43)]


def _scale(seconds: float) -> tuple[float, str]:
    if seconds >= 1:
        return 1.0, "seconds"
    return (1e3, "milliseconds") if seconds >= 1e-3 else (1e6, "microseconds")


def _paler(colour: str, share: float) -> str:
    """Mixed with white, by up to a half."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
