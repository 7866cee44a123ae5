"""Ownership of checkpoint folders: a run claims its folder, and refuses a folder of another run.

Two runs with the same name, from different folders or machines, may have the same `train.checkpoints`. So a run has an id,
each of its manifests contains the id, and the run claims its folder with a file `run-<id>.json` before it writes anything else
there. A folder with a claim or a checkpoint of another run is refused. Storage behind a URI cannot create a file exclusively,
so a start writes its claim first and looks for others second: of two concurrent starts at least one sees the other.

Checkpoints from before runs had ids belong to the run whose folder they are in, or else to the first run without an id that
is resumed on them.
"""

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from strata.platform.errors import UserError
from strata.platform.runs import Run
from strata.training.checkpoint import format
from strata.training.checkpoint.storage import Folder

CLAIM = re.compile(r"run-([0-9A-Za-z]+)\.json")
UNKNOWN = ""  # the id of checkpoints from before runs had one


@dataclass(frozen=True)
class Place:
    """State of a checkpoint folder. `claims` maps run ids to run folders; `writers` are the run ids in manifests."""

    checkpoints: Folder
    inside: bool  # within the run's own folder
    run_folder: bool  # the folder of another run, with its recipe and state
    claims: dict[str, str]
    writers: frozenset[str]

    def is_claimed_by(self, identity: str | None) -> bool:
        return identity in self.claims


def look(run: Run, checkpoints: Folder) -> Place:
    """Reads claims and manifests. Changes nothing."""
    claims = {}
    with _access(checkpoints, "read"):
        names = checkpoints.names()
    for name in names:
        if (found := CLAIM.fullmatch(name)) and (claimed_from := _claimed_from(checkpoints, name)) is not None:
            claims[found[1]] = claimed_from
    writers = {writer for name in format.step_names(checkpoints) if (writer := _writer(checkpoints / name)) is not None}
    if not writers and format.RAY_SNAPSHOT in names and not claims:
        writers = {UNKNOWN}
    inside = Path(checkpoints.path).is_relative_to(run.path)
    run_folder = not inside and not {"run.json", "recipe.yaml", "state.json"}.isdisjoint(names)
    return Place(checkpoints, inside, run_folder, claims, frozenset(writers))


def claim_new(run: Run, checkpoints: Folder) -> None:
    """Claims the folder for a new run. It must belong to no other run."""
    identity = run.id()
    assert identity
    place = look(run, checkpoints)
    if place.run_folder or place.claims or place.writers or any(name.startswith("step-") for name in checkpoints.names()):
        raise _of_another_run(run, place)
    _write_claim(run, checkpoints, identity)
    if set(look(run, checkpoints).claims) != {identity}:
        checkpoints.delete(_claim_name(identity))
        fix = "Start the run again under another name: --run NAME."
        raise UserError(f"Another run is starting in {checkpoints.path} at the same time.", fix)


def require_own(run: Run, checkpoints: Folder) -> Place:
    """Checks that the folder of a resumed or exported run belongs to it or is empty."""
    place = look(run, checkpoints)
    identity = identity_of(run, place)
    strangers = {*place.claims, *place.writers} - {identity}
    if place.inside or identity is None or place.is_claimed_by(identity):
        strangers -= {UNKNOWN}
    if strangers or place.run_folder:
        raise _of_another_run(run, place)
    origin = place.claims.get(identity or UNKNOWN)
    if origin and not place.inside and Path(origin) != run.path and _has_id(Run(Path(origin)), identity):
        fix = "Resume the original, start a new run (--run NAME), or set train.checkpoints to a folder for the copy."
        raise UserError(f"{run.path} is a copy of {origin}, whose checkpoints are in {checkpoints.path}.", fix)
    return place


def identity_of(run: Run, place: Place) -> str | None:
    """The run's id. For a run that lost its `run.json`, the id in its own checkpoint folder."""
    identity = run.id()
    if identity is None and place.inside:
        known = {*place.claims, *place.writers} - {UNKNOWN}
        if len(known) == 1:
            return known.pop()
    return identity


def claim_own(run: Run, place: Place) -> str:
    """Claims the folder for a resumed run, after `require_own`. Returns the run's id, a new one if the run has none yet."""
    identity = identity_of(run, place) or uuid.uuid4().hex
    if run.id() != identity:
        run.set_id(identity)
    if place.claims.get(identity) != str(run.path):
        _write_claim(run, place.checkpoints, identity)
    return identity


def release(run: Run, checkpoints: Folder) -> None:
    """Deletes the claim of a new run that is removed. The folder stays, because the user may have created it."""
    if identity := run.id():
        checkpoints.delete(_claim_name(identity))


def _claim_name(identity: str) -> str:
    return f"run-{identity}.json"


def _write_claim(run: Run, checkpoints: Folder, identity: str) -> None:
    with _access(checkpoints, "written"):
        checkpoints.write(_claim_name(identity), json.dumps({"id": identity, "folder": str(run.path)}).encode())


@contextmanager
def _access(checkpoints: Folder, done: str) -> Iterator[None]:
    """Reports storage that refuses access: a bucket that does not exist, wrong credentials, a folder without permission."""
    try:
        yield
    except OSError as error:
        fix = "Set train.checkpoints to a folder, or to an existing bucket, that this process may read and write."
        raise UserError(f"The checkpoint folder {checkpoints.path} cannot be {done}: {error}", fix) from error


def _claimed_from(checkpoints: Folder, name: str) -> str | None:
    """The run's folder, empty if the claim does not contain it; None if the claim has been deleted meanwhile."""
    try:
        folder = json.loads(checkpoints.read(name))["folder"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # the file name is sufficient
        return ""
    return folder if isinstance(folder, str) else ""


def _writer(folder: Folder) -> str | None:
    """Run id in a checkpoint's manifests, None for a folder without manifests."""
    try:
        manifests = [name for name in folder.names() if name.startswith("manifest-")]
    except NotADirectoryError:
        return None
    for name in manifests:
        try:
            return format.Manifest.parse(folder.read(name)).origin.run
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _has_id(run: Run, identity: str | None) -> bool:
    try:
        return run.id() == identity
    except (UserError, OSError):
        return False


def _of_another_run(run: Run, place: Place) -> UserError:
    if place.run_folder:
        fix = "Set train.checkpoints to a folder that holds only checkpoints."
        return UserError(f"{place.checkpoints.path} is the folder of another run; nothing was changed.", fix)
    owners = sorted(folder for folder in place.claims.values() if folder and folder != str(run.path))
    whose = f" ({owners[0]})" if owners else ""
    fix = "Choose another name (--run NAME) or another folder (train.checkpoints)."
    if place.writers == {UNKNOWN} and not place.claims:
        fix += (
            f" If the checkpoints belong to this run, copy {run.path}/run.json to {place.checkpoints.path}/run-{run.id()}.json."
        )
    return UserError(f"{place.checkpoints.path} holds the checkpoints of another run{whose}; nothing was changed.", fix)
