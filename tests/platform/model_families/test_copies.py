"""Copies of models from buckets and Hugging Face: complete or absent, once per machine, and found on shared storage."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from strata.platform.commands import model_pull
from strata.platform.errors import UserError
from strata.platform.model_families import bucket, copies, hub, source

ID = "Org/Some.Model"


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A bucket, as a folder with a file:// URI."""
    folder = tmp_path / "bucket" / "qwen"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model-1.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"left out")
    (folder / "original" / "model.safetensors").write_bytes(b"left out")
    return folder


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(copies.MODELS, str(tmp_path / "models-of-this-pod"))
    return tmp_path / "models-of-this-pod"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for Hugging Face."""
    asked: list[str] = []

    def snapshot_download(model: str, local_dir: Path | None = None, **_: Any) -> str:
        asked.append(model)
        assert local_dir is not None
        (local_dir / "config.json").write_text("{}")
        (local_dir / ".cache").mkdir()
        return str(local_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_buckets_model_is_copied_without_other_files(remote: Path, models: Path) -> None:
    folder = source.snapshot(f"file://{remote}/")
    assert folder.parent == models and names(folder) == [".complete", "config.json", "model-1.safetensors", "tokenizer.json"]
    assert (folder / "model-1.safetensors").read_bytes() == b"weights"
    assert source.read_config(f"file://{remote}")["architectures"] == ["LlamaForCausalLM"]
    assert [name for name in names(models) if not name.endswith(".lock")] == [folder.name], "no partial copy is left"


def test_a_changed_bucket_is_copied_again_and_an_unchanged_one_is_not(
    remote: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"file://{remote}"
    folder = copies.pull(uri)
    (remote / "model-1.safetensors").write_bytes(b"new weights")
    assert (copies.pull(uri) / "model-1.safetensors").read_bytes() == b"new weights"
    monkeypatch.setattr(bucket.Bucket, "download", lambda *_: pytest.fail("downloaded again"))
    assert copies.pull(uri) == folder


def test_an_interrupted_copy_does_not_count(remote: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"file://{remote}"

    def interrupted(self: bucket.Bucket, files: list[str], folder: Path) -> None:
        (folder / files[0]).write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bucket.Bucket, "download", interrupted)
        copies.pull(uri)
    assert copies.found(uri) is None and [name for name in names(models) if not name.endswith(".lock")] == []
    assert copies.pull(uri).is_dir()


def test_concurrent_pulls_download_once(models: Path, downloads: list[str]) -> None:
    threads = [threading.Thread(target=copies.pull, args=(ID,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert downloads == [ID]
    assert names(copies.pull(ID)) == [".complete", "config.json"]


def test_a_copy_on_the_shared_storage_is_used(models: Path, downloads: list[str], own_home: Path) -> None:
    shared = own_home / "models" / copies.place(ID).name
    shared.mkdir(parents=True)
    assert copies.found(ID) is None, "not complete"
    (shared / copies.COMPLETE).touch()
    assert source.snapshot(ID) == copies.pull(ID) == shared
    assert downloads == [] and not models.exists()


def test_an_id_without_a_copy_uses_hugging_faces_cache(models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda model, **options: str(tmp_path / model))
    assert source.snapshot(ID) == tmp_path / ID
    assert hub.snapshot(ID) == tmp_path / ID


@pytest.mark.parametrize(
    ("missing", "cause"), [("config.json", "no config.json"), ("model-1.safetensors", "no model*.safetensors")]
)
def test_a_folder_that_is_no_model_is_refused(remote: Path, models: Path, missing: str, cause: str) -> None:
    (remote / missing).unlink()
    with pytest.raises(UserError) as error:
        copies.pull(f"file://{remote}")
    assert cause in error.value.cause and str(remote) in error.value.cause


@pytest.mark.parametrize("uri", ["file:///no/such/folder", "nothing://bucket/model"])
def test_unreadable_uris_name_themselves(uri: str, models: Path) -> None:
    with pytest.raises(UserError) as error:
        copies.pull(uri)
    assert uri in error.value.cause and error.value.fix


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("gs://b/m", "gs://b/m?retry_limit_seconds=60"),
        ("gs://b/m?project_id=p", "gs://b/m?project_id=p&retry_limit_seconds=60"),
        ("gs://b/m?retry_limit_seconds=5", "gs://b/m?retry_limit_seconds=5"),
        ("s3://b/m", "s3://b/m"),
    ],
)
def test_google_retries_for_a_minute(uri: str, expected: str) -> None:
    assert bucket._with_retry_limit(uri) == expected


def test_oss_needs_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSS_ENDPOINT", raising=False)
    with pytest.raises(UserError, match="OSS_ENDPOINT is not set"):
        bucket.Bucket("oss://bucket/model")
    monkeypatch.setenv("OSS_ENDPOINT", "oss-cn-beijing-internal.aliyuncs.com")
    filesystem, path = bucket._open("oss://bucket/model")
    assert filesystem.type_name == "s3" and path == "bucket/model"


def test_a_full_disk_is_not_the_buckets_fault(remote: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bucket.Bucket, "download", full)
    with pytest.raises(UserError, match=r"cannot be copied to .*No space left") as error:
        copies.pull(f"file://{remote}")
    assert copies.MODELS in error.value.fix


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("gs://b/models/qwen/", "qwen"),
        ("gs://b/runs/mine/export", "mine"),
        ("/mnt/strata/runs/mine/export", "mine"),
        ("/models/x", "x"),
    ],
)
def test_models_are_named_by_the_last_part_of_their_source(given: str, name: str) -> None:
    assert copies.name(given) == name


def test_places_differ_by_source(models: Path) -> None:
    given = ["a/b", "gs://a/b", "s3://a/b", "gs://a/b/", "a/b-c", "gs://a/b/c"]
    places = {copies.place(one) for one in given}
    assert len(places) == len(given) and all(place.parent == models and not place.name.startswith(".") for place in places)


def test_the_command_waits_for_a_copy(models: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = own_home / "models" / copies.place(ID).name
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        shared.mkdir(parents=True, exist_ok=True)
        if len(waits) == 3:
            (shared / copies.COMPLETE).touch()

    monkeypatch.setattr("strata.platform.commands.time.sleep", sleep)
    app = typer.Typer()
    app.command()(model_pull)
    message, answer = CliRunner().invoke(app, ["--wait", ID]).stdout.splitlines()
    assert message.startswith(f"waiting for the copy of {ID}") and answer == str(shared) and len(waits) == 3


def test_the_command_does_not_wait_forever(models: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    # Not in the module `time` itself, which threads of earlier tests use too.
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr("strata.platform.commands.time", clock)
    app = typer.Typer()
    app.command()(model_pull)
    done = CliRunner().invoke(app, ["--wait", ID])
    assert isinstance(done.exception, UserError) and f"After 120 minutes there is no copy of {ID}" in str(done.exception)
    assert len(done.stdout.splitlines()) == 121 and 7200 < now[0] <= 7205


def test_the_command_prints_folders(remote: Path, models: Path, downloads: list[str]) -> None:
    app = typer.Typer()
    app.command()(model_pull)
    done = CliRunner().invoke(app, [f"file://{remote}", ID, str(remote)])
    assert done.stdout.split() == [str(copies.place(f"file://{remote}")), str(copies.place(ID)), str(remote)]
