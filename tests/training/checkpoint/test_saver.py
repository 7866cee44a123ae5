"""Saves with a stand-in for Ray Train that runs the upload synchronously."""

import errno
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.platform.recipe import Recipe
from strata.training.checkpoint import format
from strata.training.checkpoint import saver as saving
from strata.training.checkpoint.format import Origin
from strata.training.checkpoint.saver import Saver
from strata.training.checkpoint.storage import folder
from strata.training.parallel import optimizer_state

ORIGIN = Origin({}, "tokens", 4, 0)


class Failures:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes this process rank 0 of two."""

    def report(metrics: dict[str, Any], *, checkpoint_dir_name: str, checkpoint_upload_fn: Any, **_: Any) -> None:
        checkpoint_upload_fn(None, checkpoint_dir_name)

    storage = SimpleNamespace(get_storage=lambda: SimpleNamespace(storage_filesystem=None))
    monkeypatch.setattr("ray.train.report", report)
    monkeypatch.setattr("ray.train.get_context", lambda: storage)
    monkeypatch.setattr("ray.train.Checkpoint", lambda path, filesystem: path)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr(optimizer_state, "fragments", lambda *_: [])
    return 2


def saver(at: Path, recipe: Recipe, failed: Failures) -> Saver:
    return Saver(folder(at), None, recipe.model, recipe.train, recipe.parallel, ORIGIN, failed)


def other_rank_writes(at: Path, step: int) -> None:
    format.write(folder(at / format.folder_name(step)), 1, 2, step, ORIGIN, None, [])


def test_checkpoint_is_complete_when_its_last_rank_has_written(ranks: int, tmp_path: Path, small_recipe: Recipe) -> None:
    one = saver(tmp_path, small_recipe, failed := Failures())
    late = threading.Timer(0.5, other_rank_writes, (tmp_path, 4))
    late.start()
    begin = time.time()
    one.save(4, None, "async")
    assert one.last is not None and one.last.step == 4 and failed.count == 0
    assert begin + 0.4 < one.last.at < time.time()
    assert one.last.seconds is not None and one.last.seconds > 0.4


def test_wait_for_other_ranks_has_a_timeout(
    ranks: int, tmp_path: Path, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "OTHER_RANKS_TIMEOUT_S", 0.2)
    one = saver(tmp_path, small_recipe, Failures())
    other_rank_writes(tmp_path, 4)
    one.save(4, None, "async")
    whole = one.last
    one.save(8, None, "async")
    assert whole is not None and one.last is not None
    assert (one.last.step, one.last.at) == (4, whole.at), "the newest complete checkpoint and its time"


@pytest.mark.parametrize(
    ("number", "lasting"), [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EACCES, True), (errno.EIO, False)]
)
def test_failed_save_is_counted_and_ends_the_run_if_the_failure_is_permanent(
    ranks: int, tmp_path: Path, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, number: int, lasting: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(format, "write", fail)
    one = saver(tmp_path, small_recipe, failed := Failures())
    with nullcontext() if lasting else pytest.raises(OSError):
        one.save(4, None, "async")
    assert failed.count == 1 and one.last is None
    assert (one.problem is not None) == lasting
