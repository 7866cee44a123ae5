"""Claims on checkpoint folders, case by case. Nothing trains."""

import json
from pathlib import Path

import pytest

from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.runs import Run
from strata.training.checkpoint import format, ownership
from strata.training.checkpoint.ownership import Place
from strata.training.checkpoint.storage import folder


def new_run(name: str, identity: str | None = "mine") -> Run:
    run = Run(runs.runs_dir() / name)
    run.path.mkdir(parents=True)
    for file in ("recipe.yaml", "state.json"):
        (run.path / file).touch()
    if identity is not None:
        (run.path / "run.json").write_text(json.dumps({"id": identity}))
    return run


def save(place: Path, step: int, writer: str, rank: int = 0) -> None:
    origin = format.Origin({}, "tokens", 4, 0, writer)
    format.write(folder(place / f"step-{step:08}"), rank, rank + 1, step, origin, None, [])


def claim(place: Path, identity: str, claimed_from: object = "/elsewhere") -> None:
    place.mkdir(exist_ok=True, parents=True)
    (place / f"run-{identity}.json").write_text(json.dumps({"id": identity, "folder": claimed_from}))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return tmp_path / "outside"


def test_claims_and_writers_of_a_folder(outside: Path) -> None:
    run = new_run("r")
    claim(outside, "mine", "/here"), claim(outside, "other", 5)
    (outside / "run-damaged.json").write_text("{")
    (outside / "run-not_alphanumeric.json").write_text("{}")
    save(outside, 4, "mine"), save(outside, 8, "other"), save(outside, 12, "")
    (outside / "step-00000016").mkdir()  # has no manifest
    (outside / "step-00000020").touch()
    save(outside, 24, "third", rank=1)
    (outside / "step-00000024" / "manifest-00000.json").write_text("{")  # the next manifest has the id
    found = ownership.look(run, folder(outside))
    assert found.claims == {"mine": "/here", "other": "", "damaged": ""}
    assert found.writers == {"mine", "other", "", "third"}
    assert not found.inside and not found.run_folder
    assert found.is_claimed_by("mine") and not found.is_claimed_by("absent") and not found.is_claimed_by(None)


@pytest.mark.parametrize(
    ("with_claim", "with_step", "writers"), [(False, False, {""}), (True, False, set()), (False, True, {"other"})]
)
def test_rays_list_alone_is_of_an_unknown_run(outside: Path, with_claim: bool, with_step: bool, writers: set[str]) -> None:
    outside.mkdir()
    (outside / format.RAY_SNAPSHOT).touch()
    if with_claim:
        claim(outside, "other")
    if with_step:
        save(outside, 4, "other")
    assert ownership.look(new_run("r"), folder(outside)).writers == writers


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml", "state.json", "metrics.jsonl"])
def test_folder_of_a_run_is_recognized_by_its_files(outside: Path, name: str) -> None:
    run = new_run("r")
    outside.mkdir()
    (outside / name).touch()
    assert ownership.look(run, folder(outside)).run_folder == (name != "metrics.jsonl")
    own = ownership.look(run, folder(run.path))
    assert own.inside and not own.run_folder
    assert ownership.look(run, folder(run.checkpoints)).inside


def test_new_run_claims_an_empty_folder_and_releases_it(outside: Path) -> None:
    run = new_run("r")
    outside.mkdir()
    (outside / "notes.txt").touch()
    ownership.claim_new(run, folder(outside))
    assert json.loads((outside / "run-mine.json").read_text()) == {"id": "mine", "folder": str(run.path)}
    ownership.release(run, folder(outside))
    assert [path.name for path in outside.iterdir()] == ["notes.txt"]


def test_new_run_is_refused_beside_its_own_claim(outside: Path) -> None:
    """A new run has a new id. A claim with it would be a copy."""
    claim(outside, "mine")
    with pytest.raises(UserError, match=r"holds the checkpoints of another run \(/elsewhere\)"):
        ownership.claim_new(new_run("r"), folder(outside))


def test_run_that_starts_at_the_same_time_is_noticed(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ownership._write_claim

    def both(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        claim(outside, "other")

    monkeypatch.setattr(ownership, "_write_claim", both)
    with pytest.raises(UserError, match="Another run is starting in"):
        ownership.claim_new(new_run("r"), folder(outside))
    assert [path.name for path in outside.iterdir()] == ["run-other.json"]


OTHER = "holds the checkpoints of another run"


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("identity", ["mine", None])
@pytest.mark.parametrize(
    ("claims", "writers", "refused"),
    [
        # refused for: a run with an id outside and inside its folder, a run without an id outside and inside
        ((), (), "----"),
        (("mine",), ("mine",), "--x-"),
        ((), ("mine",), "--x-"),
        (("other",), (), "xxx-"),
        ((), ("other",), "xxx-"),
        (("mine", "other"), (), "xxxx"),
        (("mine",), ("other",), "xxxx"),
        ((), ("",), "x---"),
        (("mine",), ("mine", ""), "--x-"),
        ((), ("mine", ""), "x-x-"),
    ],
)
def test_folder_of_a_resumed_run(
    outside: Path, identity: str | None, inside: bool, claims: tuple[str, ...], writers: tuple[str, ...], refused: str
) -> None:
    run = new_run("r", identity)
    place = run.checkpoints if inside else outside
    for one in claims:
        claim(place, one, "/gone")
    for step, writer in enumerate(writers, 1):
        save(place, step, writer)
    if refused[2 * (identity is None) + inside] == "x":
        with pytest.raises(UserError, match=OTHER):
            ownership.require_own(run, folder(place))
    else:
        assert ownership.require_own(run, folder(place)).checkpoints.path == str(place)


def test_folder_that_is_a_runs_own_folder_is_refused(outside: Path) -> None:
    run = new_run("r")
    claim(outside, "mine")
    (outside / "run.json").touch()
    with pytest.raises(UserError, match="is the folder of another run") as raised:
        ownership.require_own(run, folder(outside))
    assert raised.value.fix == "Set train.checkpoints to a folder that holds only checkpoints."


@pytest.mark.parametrize(("state", "refused"), [("same id", True), ("another id", False), ("damaged", False), ("gone", False)])
def test_copy_of_a_run_is_refused_while_the_original_exists(outside: Path, state: str, refused: bool) -> None:
    original, copy = new_run("original"), new_run("copy")
    claim(outside, "mine", str(original.path))
    if state == "another id":
        original.set_id("another")
    if state == "damaged":
        (original.path / "run.json").write_text("{")
    if state == "gone":
        (original.path / "run.json").unlink()
    if refused:
        with pytest.raises(UserError, match=f"{copy.path} is a copy of {original.path}"):
            ownership.require_own(copy, folder(outside))
    else:
        ownership.require_own(copy, folder(outside))
    ownership.require_own(new_run("third", "third"), folder(outside / "empty"))


def test_original_is_not_a_copy_of_itself(outside: Path) -> None:
    run = new_run("r")
    claim(outside, "mine", str(run.path))
    ownership.require_own(run, folder(outside))
    moved = new_run("moved", "moved")
    claim(moved.checkpoints, "moved", str(run.path))  # within its own folder, a claim is never that of an original
    run.set_id("moved")
    ownership.require_own(moved, folder(moved.checkpoints))


def place_of(claims: dict[str, str], writers: set[str], inside: bool) -> Place:
    return Place(folder("/nowhere"), inside, False, claims, frozenset(writers))


@pytest.mark.parametrize(
    ("claims", "writers", "inside", "found"),
    [
        ({"a": ""}, set(), True, "a"),
        ({}, {"a"}, True, "a"),
        ({"a": ""}, {"a", ""}, True, "a"),
        ({"a": ""}, {"b"}, True, None),
        ({}, {""}, True, None),
        ({}, set(), True, None),
        ({"a": ""}, set(), False, None),
    ],
)
def test_lost_id_is_found_in_the_runs_own_folder(
    tmp_path: Path, claims: dict[str, str], writers: set[str], inside: bool, found: str | None
) -> None:
    place = place_of(claims, writers, inside)
    assert ownership.identity_of(new_run("without", None), place) == found
    assert ownership.identity_of(new_run("with", "mine"), place) == "mine"


def test_resumed_run_claims_its_folder(outside: Path) -> None:
    run = new_run("r", None)
    place = ownership.look(run, folder(outside))
    identity = ownership.claim_own(run, place)
    assert len(identity) == 32 and run.id() == identity
    claimed = outside / f"run-{identity}.json"
    assert json.loads(claimed.read_text())["folder"] == str(run.path)
    before = claimed.stat().st_mtime_ns, claimed.stat().st_ino
    assert ownership.claim_own(run, ownership.look(run, folder(outside))) == identity
    assert (claimed.stat().st_mtime_ns, claimed.stat().st_ino) == before  # it is not written again
    claim(outside, identity, "/before it was moved")
    ownership.claim_own(run, ownership.look(run, folder(outside)))
    assert json.loads(claimed.read_text())["folder"] == str(run.path)


@pytest.mark.parametrize(
    ("claims", "writers", "whose", "copies"),
    [
        ({"b": "/b", "a": "/a"}, set(), " (/a)", False),
        ({"a": ""}, set(), "", False),
        ({}, {"a"}, "", False),
        ({}, {""}, "", True),
        ({"a": ""}, {""}, "", False),
    ],
)
def test_refusal_names_the_owner_or_how_to_adopt_old_checkpoints(
    tmp_path: Path, claims: dict[str, str], writers: set[str], whose: str, copies: bool
) -> None:
    error = ownership._of_another_run(new_run("r"), place_of(claims, writers, False))
    assert error.cause == f"/nowhere holds the checkpoints of another run{whose}; nothing was changed."
    assert ("If the checkpoints belong to this run, copy" in error.fix) == copies
