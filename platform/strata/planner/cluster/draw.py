"""Plot of utilisation and waiting jobs over time, by policy."""

from collections.abc import Sequence
from pathlib import Path

from strata.planner.cluster.figures import busy_window, means
from strata.planner.cluster.simulate import Outcome

BINS = 120
# Okabe and Ito's colour-blind safe palette.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")


def draw(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for outcome, colour in zip(outcomes, COLOURS, strict=False):
        line, (begin, end) = outcome.timeline, busy_window(outcome)
        hours = [(begin + (number + 0.5) * (end - begin) / BINS) / 3600 for number in range(BINS)]
        busy = means(line.times, line.busy, begin, end, BINS)
        above.plot(hours, [100 * value / outcome.gpus for value in busy], color=colour, linewidth=1.2, label=outcome.policy.name)
        below.plot(hours, means(line.times, line.waiting, begin, end, BINS), color=colour, linewidth=1.2)
    above.set(ylabel="GPUs in use, %", ylim=(0, 105))
    below.set(ylabel="waiting jobs", xlabel="hours", ylim=(0, None))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    above.set_title(title, loc="left")
    figure.legend(loc="outside lower center", ncols=len(outcomes), frameon=False)
    figure.savefig(path, dpi=110)
