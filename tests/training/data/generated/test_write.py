"""Files of a generated data set, and the command that writes them."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from strata.platform.errors import UserError
from strata.platform.recipe import DataSection
from strata.training.data.corpus import open_corpus
from strata.training.data.generated import write as module
from strata.training.data.generated.command import data_make
from strata.training.data.generated.rows import Kind, rows
from strata.training.data.generated.write import HELD_OUT_ROWS, write


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_ROWS", 10)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_shards_hold_all_rows_in_order(tmp_path: Path, kind: Kind) -> None:
    train = write(tmp_path / "new" / "data", kind, 25, 3)
    assert train == tmp_path / "new" / "data" / "train"
    shards = sorted(train.iterdir())
    assert [path.name for path in shards] == [f"{kind}-{number:05}.jsonl" for number in range(3)]
    assert [len(read(path)) for path in shards] == [10, 10, 5]
    assert [row for path in shards for row in read(path)] == list(rows(kind, 25, 3))
    assert read(train.parent / "held-out.jsonl") == list(rows(kind, HELD_OUT_ROWS, 3, held_out=True))
    assert sorted(path.name for path in train.parent.parent.iterdir()) == ["data"]


@pytest.mark.parametrize(("count", "shards"), [(1, 1), (10, 1), (11, 2), (20, 2)])
def test_number_of_shards(tmp_path: Path, count: int, shards: int) -> None:
    assert len(list(write(tmp_path / "data", "completions", count, 0).iterdir())) == shards


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(kind: Kind, count: int, seed: int, held_out: bool = False) -> Any:
        if held_out:
            raise KeyboardInterrupt
        return rows(kind, count, seed)

    monkeypatch.setattr(module, "rows", failing)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "data", "chat", 12, 0)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "chat", 3, 0)  # an empty folder is free
    before = (tmp_path / "data" / "train" / "chat-00000.jsonl").read_bytes()
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "data", tmp_path / "file"):
        with pytest.raises(UserError, match=f"{path} is there already"):
            write(path, "chat", 3, 1)
    assert (tmp_path / "data" / "train" / "chat-00000.jsonl").read_bytes() == before
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file"]


def test_others_may_read_the_folder(tmp_path: Path) -> None:
    assert write(tmp_path / "data", "chat", 3, 0).parent.stat().st_mode & 0o777 == 0o755


def test_completions_are_a_corpus(tmp_path: Path) -> None:
    train = write(tmp_path / "data", "completions", 25, 0)
    corpus = open_corpus(DataSection(path=train, text_field="prompt"))
    assert sum(1 for _ in corpus.documents()) == 25


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(data_make)
    return CliRunner().invoke(app, arguments)


def test_command(tmp_path: Path) -> None:
    done = run("preferences", "--to", str(tmp_path / "data"), "--count", "12", "--seed", "7")
    assert done.exit_code == 0, done.output
    assert f"12 rows of preferences in {tmp_path / 'data' / 'train'}" in done.output
    assert sum(len(read(path)) for path in (tmp_path / "data" / "train").iterdir()) == 12
    assert read(tmp_path / "data" / "train" / "preferences-00000.jsonl") == list(rows("preferences", 10, 7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("poems", "--to", "data"), "poems"),
        (("chat",), "--to"),
        (("chat", "--to", "data", "--count", "0"), "count"),
        (("chat", "--to", "data", "--seed", "-1"), "seed"),
    ],
)
def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2 and message in done.output
    assert list(tmp_path.iterdir()) == []
