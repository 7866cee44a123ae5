"""The commands `strata eval` and `strata eval compare`."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from strata.platform import cli
from strata.platform.errors import UserError
from strata.platform.runs import Run
from strata.training.evaluation import command, progress
from strata.training.evaluation import evaluate as running
from strata.training.evaluation.subject import Subject
from strata.training.metrics import evaluations
from strata.training.metrics.evaluations import Evaluation, Score, Settings

from .conftest import evaluation


class Entry:
    def __init__(self, name: str, function: Any) -> None:
        self.name, self._function = name, function

    def load(self) -> Any:
        return self._function


@pytest.fixture
def strata(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line with these two commands, as their entry points add them."""
    entries = [Entry("eval", command.evaluate), Entry("eval.compare", command.compare)]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)
    app = cli.build()
    return lambda *words: CliRunner().invoke(app, words)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of the harness, which answers with one score."""
    found: list[dict[str, Any]] = []

    def evaluate(subject: Subject, settings: Settings, console: Console, **options: Any) -> Evaluation:
        found.append({"subject": subject, "settings": settings, **options})
        score = Score("words", "acc", 0.5, 0.125, 8, 2, "1.0", True)
        return evaluation(score, settings=settings, step=subject.step, truncated=3 if settings.truncate else 0)

    monkeypatch.setattr(running, "evaluate", evaluate)
    return found


def test_options_reach_the_harness_and_the_table_is_printed(
    strata: Any, calls: list[dict[str, Any]], run: Run, tmp_path: Path
) -> None:
    words = ["eval", "r", "--tasks", "a, b,", "--limit", "3", "--shots", "0", "--include", "x", "--include", "y", "--chat"]
    done = strata(*words, "--batch", "2", "--device", "cpu", "--tokenizer", "t", "--json", str(tmp_path / "also.json"))
    assert done.exit_code == 0, done.output
    [call] = calls
    assert call["settings"] == Settings(("a", "b"), 3, 0, True, False) and call["subject"].run == run
    assert (call["batch"], call["device"], call["tokenizer"]) == (2, "cpu", "t") and call["include"] == [Path("x"), Path("y")]
    lines = [line.split() for line in done.output.splitlines()]
    assert lines[0] == ["r", "at", "step", "5,", "1", "s"]
    assert lines[2] == ["words", "acc", "0.5000", "±", "0.1250", "2", "8", "1.0"]
    [path] = (run.path / "evaluations").iterdir()
    assert str(path) in done.output and evaluations.read(tmp_path / "also.json") == evaluations.read(path)


def test_defaults(strata: Any, calls: list[dict[str, Any]], run: Run) -> None:
    done = strata("eval", "r")
    [call] = calls
    assert call["settings"] == Settings(("python_lines",)) and call["batch"] == 8 and call["device"] is None
    assert "lost their beginning" not in done.output
    assert "3 prompts were too long" in strata("eval", "r", "--truncate").output


@pytest.mark.parametrize("words", [[], ["r", "s"]])
def test_one_subject_is_needed(strata: Any, calls: list[dict[str, Any]], words: list[str]) -> None:
    done = strata("eval", *words, "--limit", "1")
    assert isinstance(done.exception, UserError) and f"not {len(words)}" in done.exception.cause and not calls


@pytest.mark.parametrize("words", [["--tasks", ","], ["--tasks", ""]])
def test_tasks_must_be_named(strata: Any, calls: list[dict[str, Any]], run: Run, words: list[str]) -> None:
    assert isinstance(strata("eval", "r", *words).exception, UserError) and not calls


@pytest.mark.parametrize("words", [["--limit", "0"], ["--shots", "-1"], ["--batch", "0"]])
def test_numbers_out_of_range(strata: Any, calls: list[dict[str, Any]], run: Run, words: list[str]) -> None:
    assert strata("eval", "r", *words).exit_code == 2 and not calls


def test_interrupted_evaluation_writes_nothing(strata: Any, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "evaluate", interrupt)
    card = (run.export / "README.md").read_text()
    done = strata("eval", "r", "--json", str(tmp_path / "also.json"))
    assert done.exit_code == 130 and "nothing was written" in done.output
    assert not (run.path / "evaluations").exists() and not (tmp_path / "also.json").exists()
    assert (run.export / "README.md").read_text() == card


def test_runs_are_compared(strata: Any, calls: list[dict[str, Any]], run: Run, home: Path, tmp_path: Path) -> None:
    assert isinstance(strata("eval", "compare", "r").exception, UserError)
    strata("eval", "r")
    done = strata("eval", "compare", "r", "--plot", str(tmp_path / "x.png"))
    assert done.exit_code == 0 and "0.5000 ± 0.1250" in done.output and str(tmp_path / "x.png") in done.output
    assert (tmp_path / "x.png").is_file() and len(calls) == 1
    assert strata("eval", "compare", "r").exit_code == 0 and (home / ".strata" / "evaluations" / "compare.png").is_file()
    assert strata("eval", "compare").exit_code == 2


def test_missing_harness_has_the_command_that_installs_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for subject, missing in ((Subject("r", folder=run.export), "accelerate"), (Subject("u", url="http://x"), "tenacity")):
        for module in ("lm_eval", missing):
            monkeypatch.setattr(running, "find_spec", lambda name, module=module: None if name == module else object())
            with pytest.raises(UserError, match=f"the module {module} is not installed") as caught:
                running.evaluate(subject, Settings(("words",)), Console(file=io.StringIO()))
            assert "uv pip install 'lm-eval[api,hf]'" in caught.value.fix
    assert "lm_eval" not in sys.modules or sys.modules["lm_eval"]


def test_progress_without_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    output = io.StringIO()
    with progress.RequestProgress(Console(file=output, width=100)) as shown:
        shown.begin("a", None)
        shown.advance(3)
        shown.begin("b", 9)
        shown.advance(4)
        shown.advance(5)
    assert output.getvalue().splitlines() == ["a: 3 requests", "b: 4 of 9 requests", "b: 9 of 9 requests"]
    assert shown.position == "b: 9 of 9 requests"


def test_lines_of_a_log_are_ten_seconds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    shown = progress.RequestProgress(Console(file=output, width=100))
    shown.begin("a", 9)
    shown.advance(1)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1e9)
    shown.advance(1)
    shown.advance(1)
    assert output.getvalue().splitlines() == ["a: 2 of 9 requests"]
