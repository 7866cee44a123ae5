"""Comparison of runs: table, conditions that differ, and plot."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from strata.platform import runs
from strata.platform.errors import UserError
from strata.training.evaluation import compare
from strata.training.metrics import evaluations
from strata.training.metrics.evaluations import Score, Settings

from .conftest import RECIPE, evaluation

ACC = Score("words", "acc", 0.5, 0.1, 48, 0, "1.0", True)
PPL = Score("text", "ppl", 12.0, None, 9, 0, "2.0", False)


@pytest.fixture
def two(home: Path) -> list[compare.Column]:
    for name, scores in (("a", (ACC, PPL)), ("b", (replace(ACC, value=0.75, stderr=None), replace(PPL, value=11.0)))):
        evaluations.write(evaluations.folder(runs.create(name, RECIPE, name)), evaluation(*scores))
    return compare.read(["a", "b", "a"], print)


def bold(columns: list[compare.Column]) -> set[str]:
    """Bold words of the table in a terminal."""
    return {word.strip() for word in re.findall("\x1b\\[1m(.*?)\x1b\\[0m", shown(columns, force_terminal=True))}


def shown(columns: list[compare.Column], **console: bool) -> str:
    output = io.StringIO()
    compare.show(columns, Console(file=output, width=200, **console))  # type: ignore[arg-type]
    return output.getvalue()


def test_table_has_a_column_for_each_run(two: list[compare.Column]) -> None:
    assert [column.name for column in two] == ["a", "b"]
    lines = [line.split() for line in shown(two).splitlines()]
    assert lines == [
        ["task", "metric", "a", "b"],
        ["text", "ppl", "12.0000", "11.0000"],
        ["words", "acc", "0.5000", "±", "0.1000", "0.7500"],
    ]


def test_best_value_is_bold_by_its_direction(two: list[compare.Column]) -> None:
    header = {"", "task", "metric", "a", "b"}
    assert bold(two) - header == {"11.0000", "0.7500"}
    assert bold(two[:1]) <= header
    unknown = [compare.Column(c.name, {k: (e, replace(s, higher_is_better=None)) for k, (e, s) in c.scores.items()}) for c in two]
    assert bold(unknown) <= header


def test_scores_that_one_run_lacks(two: list[compare.Column]) -> None:
    only = compare.Column("c", {("more", "acc"): (evaluation(), replace(ACC, task="more"))})
    lines = [line.split() for line in shown([*two, only]).splitlines()]
    assert lines[1] == ["more", "acc", "-", "-", "0.5000", "±", "0.1000"] and lines[2][-1] == "-"


@pytest.mark.parametrize(
    ("score", "more", "text"),
    [
        (replace(ACC, samples=20), {}, "a has samples 48; b has samples 20"),
        (replace(ACC, shots=5), {}, "a has shots 0; b has shots 5"),
        (replace(ACC, version="1.1"), {}, "a has version 1.0; b has version 1.1"),
        (ACC, {"settings": Settings(("words",), chat=True)}, "a has chat False; b has chat True"),
        (ACC, {"truncated": 1}, "a has truncated prompts False; b has truncated prompts True"),
        (replace(ACC, samples=20, shots=5), {}, "a has samples 48, shots 0; b has samples 20, shots 5"),
    ],
)
def test_scores_that_are_not_comparable(score: Score, more: dict[str, object], text: str) -> None:
    other = (evaluation(**more), score)
    columns = [
        compare.Column("a", {("words", "acc"): (evaluation(), ACC), ("words", "acc_norm"): (evaluation(), ACC)}),
        compare.Column("b", {("words", "acc"): other, ("words", "acc_norm"): other}),
    ]
    assert compare.differences(columns) == [f"words: the scores are not comparable: {text}."]


def test_comparable_scores_have_no_note(two: list[compare.Column]) -> None:
    assert compare.differences(two) == []


def test_newest_evaluation_of_a_run_counts(home: Path) -> None:
    run = runs.create("a", RECIPE, "a")
    for second, value in ((5, 0.1), (7, 0.3), (6, 0.2)):
        evaluations.write(
            evaluations.folder(run), evaluation(replace(ACC, value=value), date=f"2026-01-02T03:04:0{second}+00:00")
        )
    [column] = compare.read(["a"], print)
    assert column.scores["words", "acc"][1].value == 0.3


def test_files_are_compared_too(two: list[compare.Column], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(evaluations.dump(evaluation(ACC)))
    [column] = compare.read([str(tmp_path / "other.json")], print)
    assert column.name == "other" and column.scores["words", "acc"][1] == ACC


def test_errors_name_the_run_or_the_file(home: Path, tmp_path: Path) -> None:
    runs.create("a", RECIPE, "a")
    with pytest.raises(UserError) as caught:
        compare.read(["a"], print)
    assert caught.value.cause == "Run 'a' has no evaluation." and "strata eval a" in caught.value.fix
    with pytest.raises(UserError, match="There is no run 'b'"):
        compare.read(["b"], print)
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "missing.json"):
        with pytest.raises(UserError, match="is no evaluation"):
            compare.read([str(tmp_path / name)], print)


def test_plot_is_a_picture(two: list[compare.Column], tmp_path: Path) -> None:
    many = {(f"task{number}", "acc"): (evaluation(), replace(ACC, task=f"task{number}")) for number in range(6)}
    for columns in (two, [*two, compare.Column("many", many)]):
        compare.plot(columns, tmp_path / "plots" / "compare.png")
        assert (tmp_path / "plots" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "plots").iterdir())) == 1
