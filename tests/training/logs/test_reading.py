"""`strata logs`: selection of attempts and ranks, following, and errors."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.runs import Run, State
from strata.training.logs import attempts, reading
from strata.training.logs.command import logs
from strata.training.logs.reading import Selection, Tail


@pytest.fixture
def run() -> Run:
    return runs.create("mine", recipe_file.load("laptop", ["parallel.workers=4", "train.batch=8"]), "mine")


def write(run: Run, attempt: int, rank: int, text: str) -> Path:
    path = attempts.folder(run) / f"attempt-{attempt}" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shown(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(logs)
    result = CliRunner().invoke(app, ["mine", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_the_newest_attempt_is_shown_with_ranks(run: Run) -> None:
    write(run, 9, 0, "old\n")
    write(run, 10, 0, "a\nb\n")
    write(run, 10, 1, "c")
    assert shown() == "[0] a\n[0] b\n[1] c\n"
    assert shown("--rank", "1") == "c\n"
    assert shown("--attempt", "9") == "old\n"


def test_the_older_half_comes_first(run: Run) -> None:
    path = write(run, 1, 0, "second\n")
    path.with_name(path.name + ".1").write_text("first\n")
    assert shown() == "first\nsecond\n"


def test_dumps_are_named(run: Run) -> None:
    folder = write(run, 1, 0, "a\n").parent
    (folder / "flight-0").write_bytes(b"x")
    (folder / "flight-12").write_bytes(b"x")
    assert [path.name for path in Selection("mine").dumps(folder)] == ["flight-0", "flight-12"]
    assert [path.name for path in Selection("mine", rank=12).dumps(folder)] == ["flight-12"]


@pytest.mark.parametrize(
    ("arguments", "cause", "fix"),
    [
        (["--rank", "3"], "Attempt 2 of run 'mine' has no log of rank 3.", "Ranks: 0 to 2, 5."),
        (["--attempt", "3"], "Run 'mine' has no logs of attempt 3.", "Attempts: 1 to 2."),
        (["--rank", "4", "--follow"], "Attempt 2 of run 'mine' has no log of rank 4.", "Ranks: 0 to 2, 5."),
    ],
)
def test_unknown_ranks_and_attempts_name_the_known_ones(run: Run, arguments: list[str], cause: str, fix: str) -> None:
    write(run, 1, 0, "")
    for rank in (0, 1, 2, 5):
        write(run, 2, rank, "")
    with pytest.raises(UserError, match=re.escape(cause)) as caught:
        shown(*arguments)
    assert caught.value.fix == fix


def test_unknown_runs_and_runs_without_logs_are_refused(run: Run) -> None:
    with pytest.raises(UserError, match="Run 'mine' has no logs"):
        shown()
    with pytest.raises(UserError, match="There is no run 'mien'") as caught:
        list(reading.lines(Selection("mien")))
    assert "mine" in caught.value.fix
    with pytest.raises(UserError, match="There is no run"):
        list(reading.lines(Selection("../mine")))


def test_following_waits_for_ranks_and_attempts_until_the_run_ends(run: Run) -> None:
    first = write(run, 1, 0, "one\ntw")

    def events() -> Iterator[None]:
        first.write_text("one\ntwo\n")
        yield
        write(run, 1, 1, "late\n")
        yield
        write(run, 2, 0, "again\n")
        yield
        run.write_state(State("failed"))
        write(run, 2, 0, "again\nlast")
        yield

    happening = events()
    found = list(reading.lines(Selection("mine"), follow=True, sleep=lambda _: next(happening)))
    assert found == [b"one\n", b"two\n", b"[1] late\n", b"[strata] attempt 2\n", b"again\n", b"last\n"]


def test_following_reads_across_a_new_file(run: Run) -> None:
    path = write(run, 1, 0, "one\n")
    tail = Tail(path)
    assert b"".join(tail.new()) == b"one\n"
    with path.open("a") as file:
        file.write("two\n")
    path.rename(path.with_name(path.name + ".1"))
    assert b"".join(tail.new()) == b"two\n"  # before the new file exists
    path.write_text("three, a longer line\n")
    assert b"".join(tail.new()) == b"three, a longer line\n"
    assert b"".join(tail.new()) == b""


def test_attempts_are_numbered_and_the_oldest_deleted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts.threading.Thread, "start", lambda thread: thread.run())  # at once
    monkeypatch.setattr(attempts, "MOST_ATTEMPTS", 3)
    (attempts.folder(run)).mkdir()
    (attempts.folder(run) / "attempt-x").mkdir()
    for _ in range(5):
        attempts.begin(run)
    assert list(attempts.every(attempts.folder(run))) == [3, 4, 5]


def test_storage_that_cannot_be_written_costs_the_logs_only(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    attempts.folder(run).write_text("in the way")
    attempts.begin(run)(0)
    assert "no logs" in capsys.readouterr().err


def test_logs_of_a_run_that_left_no_folder_are_found(run: Run) -> None:
    write(run, 1, 0, "the reason\n")
    attempts.set_aside(run)
    run.remove()
    assert shown() == "the reason\n"
    runs.create("mine", recipe_file.load("laptop"), "mine")
    with pytest.raises(UserError, match="has no logs"):
        shown()
