"""Files of evaluations."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from strata.platform.runs import Run
from strata.training.metrics import evaluations
from strata.training.metrics.evaluations import Evaluation, Score, Settings

ONE = Evaluation(
    benchmark="eval",
    command="strata eval r",
    date="2026-01-02T03:04:05+00:00",
    machine={"cores": 2},
    versions={"python": "3.11"},
    subject="r",
    step=None,
    settings=Settings(("a", "b"), limit=3),
    seconds=1.5,
    truncated=0,
    scores=(Score("a", "acc", 0.5, 0.1, 3, 0, "1.0", True),),
)


def test_file_is_read_back_and_its_name_sorts_by_time(tmp_path: Path) -> None:
    path = evaluations.write(tmp_path, ONE)
    later = evaluations.write(tmp_path, replace(ONE, date="2026-01-02T03:04:06+00:00"))
    assert path.name.startswith("20260102T030405-") and path.name < later.name
    assert evaluations.read(path) == ONE
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name, later.name]


def test_evaluations_of_the_same_second_are_both_there(tmp_path: Path) -> None:
    assert evaluations.write(tmp_path, ONE) != evaluations.write(tmp_path, replace(ONE, seconds=2.0))


def test_infinite_values_are_read_back(tmp_path: Path) -> None:
    score = Score("a", "ppl", math.inf, None, 1)
    assert evaluations.read(evaluations.write(tmp_path, replace(ONE, scores=(score,)))).scores == (score,)


def test_damaged_files_are_left_out_with_a_line(tmp_path: Path) -> None:
    run, printed = Run(tmp_path), list[str]()
    assert evaluations.read_all(run, printed.append) == []
    folder = evaluations.folder(run)
    evaluations.write(folder, ONE)
    (folder / "0.json").write_text('{"benchmark": "eval"}')
    (folder / "1.json").mkdir()
    assert evaluations.read_all(run, printed.append) == [ONE]
    assert len(printed) == 2 and "0.json cannot be read" in printed[0]


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        evaluations.write(tmp_path / "evaluations", ONE)
    assert not list((tmp_path / "evaluations").iterdir())


def test_newest_scores_replace_older_ones_by_task_and_metric() -> None:
    other = replace(ONE, step=9, scores=(Score("a", "acc", 0.6, None, 3), Score("a", "acc_norm", 0.1, None, 3)))
    found = evaluations.newest([ONE, other])
    assert {key: (one.step, score.value) for key, (one, score) in found.items()} == {
        ("a", "acc"): (9, 0.6),
        ("a", "acc_norm"): (9, 0.1),
    }
    assert evaluations.newest([other, ONE])["a", "acc"][1].value == 0.5
