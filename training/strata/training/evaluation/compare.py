"""Scores of several runs side by side: a table and a plot."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strata.platform import runs
from strata.platform.errors import UserError, shown
from strata.platform.files import write_atomic
from strata.training.metrics import evaluations
from strata.training.metrics.evaluations import Evaluation, Score

Key = tuple[str, str]  # task and metric


@dataclass(frozen=True)
class Column:
    """The newest scores of a run, or the scores in a file."""

    name: str
    scores: Mapping[Key, tuple[Evaluation, Score]]


def read(names: Sequence[str], say: Callable[[str], None]) -> list[Column]:
    """Columns of runs by name, and of files that `strata eval --json` wrote."""
    return [_read(name, say) for name in dict.fromkeys(names)]


def _read(name: str, say: Callable[[str], None]) -> Column:
    if name.endswith(".json"):
        try:
            found = evaluations.read(Path(name))
        except (OSError, ValueError) as error:
            cause = f"{shown(name, 200)} is no evaluation: {str(error).splitlines()[0]}."
            raise UserError(cause, "Name a run, or a file that 'strata eval --json' wrote.") from None
        return Column(Path(name).stem, evaluations.newest([found]))
    run = runs.find(name)
    scores = evaluations.newest(evaluations.read_all(run, say))
    if not scores:
        raise UserError(f"Run '{name}' has no evaluation.", f"Evaluate it first: strata eval {name}")
    return Column(name, scores)


def keys(columns: Sequence[Column]) -> list[Key]:
    return sorted({key for column in columns for key in column.scores})


def cell(score: Score) -> str:
    return f"{score.value:.4f}" + (f" ± {score.stderr:.4f}" if score.stderr is not None else "")


def table(columns: Sequence[Column]) -> Table:
    """A row for each task and metric. The best value is bold where the task defines which is better."""
    found = Table("task", "metric", box=None, header_style="bold")
    for column in columns:
        found.add_column(column.name, justify="right")
    for task, metric in keys(columns):
        best = _best(columns, (task, metric)) if len(columns) > 1 else None
        cells = []
        for column in columns:
            entry = column.scores.get((task, metric))
            style = "bold" if entry and entry[1].value == best else ""
            cells.append(Text(cell(entry[1]) if entry else "-", style))
        found.add_row(task, metric, *cells)
    return found


def _best(columns: Sequence[Column], key: Key) -> float | None:
    scores = [column.scores[key][1] for column in columns if key in column.scores]
    if scores[0].higher_is_better is None:
        return None
    return (max if scores[0].higher_is_better else min)(score.value for score in scores)


def differences(columns: Sequence[Column]) -> list[str]:
    """Tasks whose scores are not comparable, each with the conditions that differ."""
    lines: dict[str, None] = {}  # metrics of a task have the same line
    for key in keys(columns):
        conditions = {column.name: _conditions(*column.scores[key]) for column in columns if key in column.scores}
        first, *others = conditions.values()
        names = [name for name in first if any(other[name] != first[name] for other in others)]
        if names:
            each = "; ".join(
                f"{run} has {', '.join(f'{name} {found[name]}' for name in names)}" for run, found in conditions.items()
            )
            lines[f"{key[0]}: the scores are not comparable: {each}."] = None
    return list(lines)


def _conditions(evaluation: Evaluation, score: Score) -> dict[str, object]:
    return {
        "samples": score.samples,
        "shots": score.shots,
        "version": score.version,
        "chat": evaluation.settings.chat,
        "truncated prompts": evaluation.truncated > 0,
    }


def plot(columns: Sequence[Column], path: Path) -> None:
    """Bars with standard errors: a panel for each metric, a group of bars for each task."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = sorted({metric for _, metric in keys(columns)})
    tasks = {metric: [task for task, other in keys(columns) if other == metric] for metric in metrics}
    widest = max(len(each) for each in tasks.values())
    figure = Figure(figsize=(max(8.0, 0.4 * widest * (len(columns) + 1)), 3.2 * len(metrics)), layout="constrained")
    width = 0.8 / len(columns)
    for number, metric in enumerate(metrics, 1):
        axes = figure.add_subplot(len(metrics), 1, number)
        for place, column in enumerate(columns):
            found = [
                (at, column.scores[task, metric][1]) for at, task in enumerate(tasks[metric]) if (task, metric) in column.scores
            ]
            axes.bar(
                [at + (place - (len(columns) - 1) / 2) * width for at, _ in found],
                [score.value for _, score in found],
                width,
                yerr=[score.stderr or 0.0 for _, score in found],
                capsize=3,
                label=column.name,
            )
        axes.set_xticks(
            range(len(tasks[metric])), tasks[metric], rotation=45 if widest > 4 else 0, ha="right" if widest > 4 else "center"
        )
        axes.set_ylabel(metric)
        axes.legend()
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    write_atomic(path, image.getvalue())


def show(columns: Sequence[Column], console: Console) -> None:
    console.print(table(columns))
    for line in differences(columns):
        console.print(line, markup=False)
