"""A checkpoint folder belongs to one run: every other run is refused and changes nothing in it."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.runs import Run, State
from strata.training.checkpoint import format, ownership
from strata.training.checkpoint.storage import folder

from ..conftest import SMALL
from ..faults import contents, losses, strata, without_ray


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)


def train(*words: str, home: Path, corpus: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("STRATA_HOME", str(home))
    return strata("train", *words, *SMALL, f"data.path={corpus}", f"train.checkpoints={place}")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "file://", "local://"])
def test_second_home_with_the_same_name_and_folder_is_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    one, two, bucket = tmp_path / "one", tmp_path / "two", tmp_path / "bucket"
    place = f"{scheme}{bucket}"
    assert train(home=one, corpus=corpus, place=place, monkeypatch=monkeypatch) == 0
    first = Run(one / "runs" / "laptop-1")
    manifest = json.loads((bucket / "laptop-1" / "step-00000008" / "manifest-00000.json").read_text())
    assert manifest["origin"]["run"] == first.id()
    before = contents(bucket), contents(first.path)
    capsys.readouterr()
    for words in ([], ["train.steps=4"], ["--run", "laptop-1", "--or-resume"]):  # fewer steps than it has, too
        assert train(*words, home=two, corpus=corpus, place=place, monkeypatch=monkeypatch) == 1
        error = capsys.readouterr().err
        assert f"holds the checkpoints of another run ({first.path}); nothing was changed." in error and "--run" in error
        assert not (two / "runs" / "laptop-1").exists()
        assert (contents(bucket), contents(first.path)) == before
    assert train("--run", "mine", home=two, corpus=corpus, place=place, monkeypatch=monkeypatch) == 0
    assert losses(Run(two / "runs" / "mine")) == losses(first)


@pytest.mark.slow
def test_copied_run_is_refused_and_moved_run_is_resumed(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, bucket = tmp_path / "one", tmp_path / "two", tmp_path / "bucket"
    assert train("--run", "a", home=one, corpus=corpus, place=str(bucket), monkeypatch=monkeypatch) == 0
    shutil.copytree(one, two)
    monkeypatch.setenv("STRATA_HOME", str(two))
    before = contents(bucket)
    for command in (["train", "--resume", "a", "train.steps=12"], ["export", "a"]):
        assert strata(*command) == 1
        assert f"{two}/runs/a is a copy of {one}/runs/a" in capsys.readouterr().err
    assert contents(bucket) == before
    shutil.rmtree(one)  # so it was moved
    assert strata("train", "--resume", "a", "train.steps=12") == 0
    assert [step for step, _ in losses(Run(two / "runs" / "a"))] == list(range(1, 13))

    # Under another name its checkpoints are not found, and it does not start over.
    (two / "runs" / "a").rename(two / "runs" / "b")
    before = contents(two / "runs" / "b")
    assert strata("train", "--resume", "b", "train.steps=16") == 1
    assert "Run 'b' has reached step 12 by its records, but there is no checkpoint" in capsys.readouterr().err
    assert contents(two / "runs" / "b") == before


@pytest.mark.slow
def test_wrong_checkpoint_folder_is_refused_and_the_right_one_resumes(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty mount point is a wrong folder too: usually a bucket is mounted there."""
    one, bucket = tmp_path / "one", tmp_path / "bucket"
    assert train("--run", "a", home=one, corpus=corpus, place=str(bucket), monkeypatch=monkeypatch) == 0
    run = Run(one / "runs" / "a")
    before = contents(run.path)
    bucket.rename(tmp_path / "not mounted")
    bucket.mkdir()
    retry = ["--recipe", str(run.path / "recipe.yaml"), "--run", "a", "--or-resume"]
    for words in (["--resume", "a", "train.checkpoints=elsewhere"], ["--resume", "a"], [*retry, "train.steps=12"]):
        assert strata("train", *words, "train.steps=12") == 1
        error = capsys.readouterr().err
        assert "has reached step 8 by its records, but there is no checkpoint" in error and "--run NAME" in error
        assert contents(run.path) == before
    bucket.rmdir()
    (tmp_path / "not mounted").rename(bucket)
    assert strata("train", *retry, "train.steps=12") == 0
    assert [step for step, _ in losses(run)] == list(range(1, 13))


def test_relative_checkpoint_folder_does_not_depend_on_the_working_directory(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--run", "a", home=tmp_path / "one", corpus=corpus, place="here", monkeypatch=monkeypatch) == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert strata("train", "--resume", "a", "train.steps=12") == 0
    assert (tmp_path / "here" / "a" / "step-00000012").is_dir()


def test_at_most_one_of_concurrent_starts_claims_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_file.load()
    together, won, lost = threading.Barrier(8), list[Run](), list[UserError]()
    several = [runs.create(f"r{number}", recipe, "laptop") for number in range(8)]

    def claim(run: Run) -> None:
        together.wait()
        try:
            ownership.claim_new(run, folder(tmp_path / "place"))
            won.append(run)
        except UserError as error:
            lost.append(error)

    threads = [threading.Thread(target=claim, args=(run,)) for run in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) <= 1 and len(won) + len(lost) == 8
    assert len(list((tmp_path / "place").glob("run-*.json"))) == len(won)


def test_checkpoints_from_before_runs_had_ids(home: Path) -> None:
    """Such checkpoints belong to the run whose folder they are in. A new run may not start in their folder."""
    recipe = recipe_file.load()
    old = runs.create("old", recipe, "laptop")
    (old.path / "run.json").unlink()
    origin = format.Origin({}, "tokens", 4, 0)
    format.write(folder(old.checkpoints / "step-00000004"), 0, 1, 4, origin, None, [])
    place = ownership.require_own(old, folder(old.checkpoints))
    identity = ownership.claim_own(old, place)
    assert old.id() == identity and ownership.require_own(old, folder(old.checkpoints)).is_claimed_by(identity)

    outside = home / "outside"
    format.write(folder(outside / "step-00000004"), 0, 1, 4, origin, None, [])
    new = runs.create("new", recipe, "laptop")
    for refused in (ownership.claim_new, ownership.require_own):
        with pytest.raises(UserError, match="holds the checkpoints of another run") as raised:
            refused(new, folder(outside))
        assert f"copy {new.path}/run.json to {outside}/run-{new.id()}.json" in raised.value.fix
    shutil.copy(new.path / "run.json", outside / f"run-{new.id()}.json")
    assert ownership.require_own(new, folder(outside)).is_claimed_by(new.id())


@pytest.mark.parametrize("name", ["step-00000004", "step-00000004.damaged", format.RAY_SNAPSHOT, "run-abc.json"])
def test_folder_with_leftovers_of_another_run_is_refused(home: Path, name: str) -> None:
    run = runs.create("new", recipe_file.load(), "laptop")
    left = home / "place" / name
    left.parent.mkdir()
    left.mkdir() if name.startswith("step-") else left.touch()
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        ownership.claim_new(run, folder(left.parent))
    assert list(left.parent.iterdir()) == [left]


def test_run_folder_of_another_run_is_refused(home: Path) -> None:
    first, second = (runs.create(name, recipe_file.load(), "laptop") for name in ("first", "second"))
    before = contents(first.path)
    for refused in (ownership.claim_new, ownership.require_own):
        with pytest.raises(UserError, match="is the folder of another run"):
            refused(second, folder(first.path))
    assert contents(first.path) == before
    ownership.claim_new(first, folder(first.path))  # a run may use its own folder


def test_run_killed_before_its_first_checkpoint_starts_over(home: Path, corpus: Path) -> None:
    recipe = recipe_file.load("laptop", [*SMALL, f"data.path={corpus}"])
    run = runs.create("early", recipe, "laptop")
    ownership.claim_new(run, folder(run.checkpoints))
    run.write_state(State("running", 3, 8))
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3)))
    half = run.checkpoints / "step-00000003"
    half.mkdir()
    (half / format.UNFINISHED).touch()
    assert strata("train", "--resume", "early") == 0
    assert [step for step, _ in losses(run)] == list(range(1, 9))
