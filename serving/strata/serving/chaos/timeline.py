"""Plots a timeline: a line per request, with its TTFT and end, and the kills."""

from pathlib import Path

from strata.serving.chaos.run import Outcome, Verdict

COLORS = {Verdict.SAME: "#2b6cb0", Verdict.DIFFERENT: "#dd6b20", Verdict.LOST: "#c53030"}
KILL_COLORS = {"prefill": "#2f855a", "decode": "#6b46c1", "gateway": "#1a202c", "controller": "#b7791f", "gcs": "#c53030"}

Line = tuple[int, float, float, str]  # row, start, end, color


def draw(outcome: Outcome, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    began = outcome.disturbed.began
    waits: list[Line] = []
    streams: list[Line] = []
    broken: list[tuple[float, int]] = []
    for row, (one, verdict) in enumerate(zip(outcome.disturbed.sent, outcome.verdicts(), strict=True)):
        for attempt in one.attempts:
            start, end = attempt.began - began, attempt.ended - began
            first = end if attempt.first is None else attempt.first - began
            waits.append((row, start, first, COLORS[verdict]))
            streams.append((row, first, end, COLORS[verdict]))
        broken += [(attempt.ended - began, row) for attempt in one.attempts[:-1]]
    for lines, alpha in ((waits, 0.3), (streams, 1.0)):
        rows, starts, ends, colors = zip(*lines, strict=True)
        axes.hlines(rows, starts, ends, colors=colors, alpha=alpha, linewidth=1)
    axes.scatter([moment for moment, _ in broken], [row for _, row in broken], marker="x", s=12, color=KILL_COLORS["gateway"])
    for kill in outcome.kills:
        color = KILL_COLORS[kill.kind.role]
        axes.axvline(kill.at - began, color=color, linewidth=1.2)
        axes.text(kill.at - began, 1.0, f" {kill.kind}", color=color, rotation=45, transform=axes.get_xaxis_transform())
        if kill.back is not None:
            axes.axvspan(kill.at - began, kill.back - began, color=color, alpha=0.06)
    axes.set(xlabel="seconds", ylabel="request, in the order sent", ylim=(-1, len(outcome.disturbed.sent)))
    axes.invert_yaxis()
    faint = Patch(color=COLORS[Verdict.SAME], alpha=0.3, label="TTFT (without streaming: the whole answer)")
    axes.legend(handles=[faint, *(Patch(color=COLORS[verdict], label=verdict) for verdict in Verdict)], loc="upper right")
    FigureCanvasAgg(figure).print_png(str(path))
