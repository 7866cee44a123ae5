"""Checkpoints in S3, with pyarrow's S3 file system and a server in memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import TrainSection
from strata.platform.runs import Run
from strata.training.checkpoint import format, ownership
from strata.training.checkpoint.format import Origin
from strata.training.checkpoint.resharding import Reader
from strata.training.checkpoint.storage import Folder, folder
from strata.training.parallel.optimizer_state import Fragment
from strata.training.parallel.shard_map import Shard

from .. import s3_stand_in
from ..conftest import SMALL
from ..faults import StandIn, losses, strata, without_ray
from ..s3_stand_in import Store

ORIGIN = Origin(model={"layers": 2}, tokens="abc", batch=8, seed=0)
WHOLE = torch.arange(24.0).view(6, 4)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with s3_stand_in.running("bucket") as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.fixture
def checkpoints(s3: Store) -> Folder:
    return folder("s3://bucket/runs/mine")


def write(checkpoints: Folder, step: int, val_loss: float | None = None, ranks: int = 2) -> Folder:
    """Writes a checkpoint of two ranks, or the files of the first of them."""
    target = checkpoints / format.folder_name(step)
    for rank in range(ranks):
        half = WHOLE.flatten()[rank * 12 : rank * 12 + 12]
        format.write(target, rank, 2, step, ORIGIN, val_loss, [Fragment(Shard("w", (6, 4), None, 0), "weight", rank * 12, half)])
    return target


def objects(s3: Store) -> set[str]:
    """Objects of the bucket, without those that mark folders."""
    return {name for name in s3.buckets["bucket"] if not name.endswith("/")}


def train_section(checkpoints: str) -> TrainSection:
    return recipe_file.load("laptop", [f"train.checkpoints={checkpoints}"]).train


def no_message(message: str) -> None:
    raise AssertionError(message)


def test_files_of_a_bucket(s3: Store) -> None:
    place = folder("s3://bucket/here")
    assert place.names() == [] and place.size("a") is None and place.written_at("a") is None
    inner = place / "inner"
    inner.write("a", b"one")
    inner.write("a", b"other")
    assert place.names() == ["inner"] and inner.names() == ["a"] and inner.size("a") == 5
    assert inner.read("a") == b"other" and objects(s3) == {"here/inner/a"}
    assert (inner.written_at("a") or 0) > 1e9
    with inner.open("a") as file:
        assert file.read_at(2, 1) == b"th"
    inner.delete("a")
    inner.delete("a")
    assert inner.names() == []
    inner.write("b", b"")
    inner.remove()
    inner.remove()
    assert place.names() == [] and objects(s3) == set()


def test_large_file_is_uploaded_in_parts(s3: Store) -> None:
    content = bytes(range(256)) * (12 * 2**12)  # 12 MiB
    with folder("s3://bucket/here").create("a") as stream:
        stream.write(content)
    assert s3.buckets["bucket"]["here/a"][0] == content
    assert sum(request == "PUT bucket/here/a" for request in s3.requests) >= 2 and not s3.uploads


def test_file_is_not_visible_before_it_is_complete(s3: Store) -> None:
    """A reader finds the old content or the new one: S3 shows an object when its upload or its copy is complete."""
    place = folder("s3://bucket/here")
    place.write("manifest.json", b"old")
    stream = place.create(".manifest.json")
    stream.write(b"x" * 1000)
    assert place.read("manifest.json") == b"old" and place.names() == ["manifest.json"]
    stream.close()
    place.write("manifest.json", b"new")
    assert place.read("manifest.json") == b"new" and place.names() == ["manifest.json"]


def test_newest_checkpoint_is_found_and_read(s3: Store, checkpoints: Folder) -> None:
    assert format.newest(checkpoints, no_message) is None, "no checkpoint yet"
    for step in (4, 12):
        write(checkpoints, step)
    found = format.newest(checkpoints, no_message)
    assert found is not None and found.step == 12 and found.origin == ORIGIN and found.whole_at() is not None
    assert torch.equal(Reader(found).whole("w"), WHOLE)
    assert (checkpoints / "step-00000012").names() == [
        "manifest-00000.json",
        "manifest-00001.json",
        "part-00000.bin",
        "part-00001.bin",
    ]


def test_damaged_checkpoint_is_skipped_and_set_aside(s3: Store, checkpoints: Folder) -> None:
    write(checkpoints, 4)
    damaged = write(checkpoints, 8)
    unfinished = write(checkpoints, 12, ranks=1)
    with damaged.create("part-00001.bin") as stream:
        stream.write(b"short")
    messages: list[str] = []
    found = format.newest(checkpoints, messages.append)
    assert found is not None and found.step == 4
    assert [message.split(" (")[0] for message in messages] == [
        "Checkpoint step-00000012 is damaged",
        "Checkpoint step-00000008 is damaged",
    ]
    assert format.is_unfinished(unfinished) and not format.is_unfinished(damaged)
    assert format.set_aside_after(checkpoints, 4) == ["step-00000008.damaged"]
    assert checkpoints.names() == ["step-00000004", "step-00000008.damaged"]
    assert (checkpoints / "step-00000008.damaged").read("part-00001.bin") == b"short"
    assert len((checkpoints / "step-00000008.damaged").names()) == 4
    assert format.newest(checkpoints, no_message) is not None


def test_old_checkpoints_are_pruned(s3: Store, checkpoints: Folder) -> None:
    for step, val_loss in ((2, 1.0), (4, 3.0), (6, 2.0)):
        write(checkpoints, step, val_loss)
    newest = format.prune(checkpoints, keep=1, keep_best=True)
    assert newest is not None and newest.step == 6
    assert checkpoints.names() == ["step-00000002", "step-00000006"]
    assert not any("step-00000004" in name for name in objects(s3))


def test_checkpoints_of_a_run_are_below_the_uri(s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "runs" / "mine")
    write(format.location(run, train_section("s3://bucket/runs")), 4)
    assert "runs/mine/step-00000004/part-00000.bin" in objects(s3)
    # Options of the file system in the URI, in place of the environment.
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    uri = f"s3://bucket/runs?endpoint_override=127.0.0.1:{s3.port}&scheme=http"
    found = format.newest(format.location(run, train_section(uri)), no_message)
    assert found is not None and found.step == 4


def test_missing_bucket_is_an_error_that_names_it(s3: Store) -> None:
    place = folder("s3://absent/runs/mine")
    assert place.names() == []
    with pytest.raises(OSError, match="Bucket 'absent' not found"):
        write(place, 4)
    assert "absent" not in s3.buckets, "no bucket is created"


def test_wrong_credentials_are_an_error(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder("s3://bucket/runs/mine"), 4)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    place = folder("s3://bucket/runs/mine")
    with pytest.raises(OSError, match="INVALID_ACCESS_KEY_ID"):
        format.newest(place, no_message)
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        write(place, 8)
    assert not any("step-00000008" in name for name in objects(s3))


@pytest.mark.parametrize(
    ("bucket", "key", "message"), [("absent", "", "cannot be written"), ("bucket", "wrong", "cannot be read")]
)
def test_storage_without_access_is_refused_before_training(
    s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str, key: str, message: str
) -> None:
    if key:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    run = Run(tmp_path / "mine")
    run.path.mkdir()
    run.set_id("new")
    with pytest.raises(UserError, match=f"{bucket}/runs/mine {message}"):
        ownership.claim_new(run, folder(f"s3://{bucket}/runs/mine"))


def test_run_in_s3_is_resumed_after_damage_and_exported(
    s3: Store, home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole of `strata train` and `strata export`, except Ray and the engine."""
    without_ray(monkeypatch)
    settings = [*SMALL, f"data.path={corpus}", "train.checkpoints=s3://bucket/runs"]
    assert strata("train", "--run", "whole", *settings) == 0
    expected = losses(Run(home / "runs" / "whole"))
    StandIn.hooks = {6: (home / "runs" / "r" / "stop").touch}
    assert strata("train", "--run", "r", *settings) == 130
    (home / "runs" / "r" / "stop").unlink()
    StandIn.hooks = {}
    assert {"runs/r/step-00000004/part-00000.bin", "runs/r/step-00000006/part-00000.bin"} <= objects(s3)
    s3.buckets["bucket"]["runs/r/step-00000006/part-00000.bin"] = (b"short", 0.0)
    assert strata("train", "--resume", "r") == 0
    assert losses(Run(home / "runs" / "r")) == expected
    assert "runs/r/step-00000006.damaged/part-00000.bin" in objects(s3)
    assert not list((home / "runs" / "r").rglob("part-*.bin")), "no checkpoint in the run's own folder"
    assert strata("export", "r", "--to", str(home / "exported")) == 0
    assert f"exported to {home / 'exported'}" in capsys.readouterr().out
    assert (home / "exported" / "model.safetensors").is_file()
