"""A run is one folder: `runs/<name>/{run.json, recipe.yaml, state.json, metrics.jsonl, loss.png, checkpoints/, export/}`."""

import difflib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, TypeAdapter, ValidationError

from strata.platform import file_errors, recipe_file
from strata.platform.errors import UserError
from strata.platform.files import home, write_atomic
from strata.platform.processes import is_alive
from strata.platform.ray_cluster import excluded_nodes
from strata.platform.recipe import Recipe

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
FILES = ("run.json", "recipe.yaml", "state.json", "metrics.jsonl", "checkpoints", "export")  # a folder with any of these is a run
# Mounted buckets and some network file systems have no locks. There only state.json names the process that trains a run.
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)

Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class State:
    """Status of a run as the driver last wrote it.

    `pid` and `pid_created` identify the driver process even if the PID was reused. `host` is its machine, on a cluster its
    pod."""

    status: str  # running | finished | interrupted | failed
    step: Count = 0
    steps: Count = 0
    loss: float | None = None
    val_loss: float | None = None
    pid: Annotated[int, Field(ge=0, lt=2**31)] = 0
    pid_created: float = 0.0
    host: str = ""  # empty in files of older versions: this machine
    saved: Count = 0  # step of the newest complete checkpoint when this was written
    layout: str = ""  # in which the last step ran

    def elsewhere(self) -> bool:
        """True if the last state is running on another machine, whose processes cannot be checked from here."""
        return self.status == "running" and self.host not in ("", socket.gethostname())

    def observed_status(self) -> str:
        """The status, with 'killed' for a running state whose driver process is gone."""
        if self.elsewhere():
            return f"running on {self.host}"
        if self.status == "running" and not is_alive(self.pid, self.pid_created):
            return "killed"
        return self.status


_STATE = TypeAdapter(State)


class DamagedRun(UserError):
    """A file of a run's folder is missing or cannot be read."""


@dataclass(frozen=True)
class Run:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def recipe(self) -> Recipe:
        path = self.path / "recipe.yaml"
        if not path.is_file():
            fix = f"Restore it, or pass a recipe: strata train --recipe RECIPE --run {self.name} --or-resume"
            raise DamagedRun(f"{path} is missing.", fix)
        return recipe_file.load(str(path))

    def has_state(self) -> bool:
        return os.path.lexists(self.path / "state.json")

    def state(self) -> State:
        path = self.path / "state.json"
        fix = f"If no process trains this run, remove that file and continue with: strata train --resume {self.name}"
        try:
            return _STATE.validate_json(path.read_bytes())
        except FileNotFoundError:
            raise DamagedRun(f"{path} is missing.", f"Continue with: strata train --resume {self.name}") from None
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise DamagedRun(f"{path} is damaged: {where + ': ' if where else ''}{problem['msg']}.", fix) from None

    def id(self) -> str | None:
        """The unique id from the run's creation. None for a run of an older version without ids."""
        path = self.path / "run.json"
        try:
            found = json.loads(path.read_bytes())["id"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            found = None
        if not isinstance(found, str) or not found.isalnum():
            fix = "Restore it, or remove it: the run then uses the id in its checkpoints folder."
            raise DamagedRun(f"{path} is damaged: it has no id.", fix)
        return found

    def set_id(self, identity: str) -> None:
        write_atomic(self.path / "run.json", _identity(identity))

    def damage(self) -> str | None:
        """The first problem of the folder, for a list of runs."""
        try:
            self.state()
            self.recipe()
            self.id()
            excluded_nodes.read(self.path)
        except UserError as error:
            return error.cause
        except OSError as error:
            explained = file_errors.explain(error)
            return explained.cause if explained else str(error)
        return None

    def has_export(self) -> bool:
        """True for a model of text (config.json) and for one of pictures (model_index.json)."""
        try:
            return any((self.export / name).is_file() for name in ("config.json", "model_index.json"))
        except OSError:  # a folder without permission
            return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the run against a second driver on this machine. The kernel releases the lock when the process ends."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"Run '{self.name}' is being trained by another process.", "Wait for it, or stop it.") from None
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
            yield
        finally:
            os.close(folder)

    def write_state(self, state: State) -> None:
        write_atomic(self.path / "state.json", json.dumps(asdict(state)))

    def write_running(self, state: State) -> None:
        me = psutil.Process(os.getpid())
        self.write_state(replace(state, status="running", pid=me.pid, pid_created=me.create_time(), host=socket.gethostname()))

    def remove(self) -> None:
        shutil.rmtree(self.path)


def runs_dir() -> Path:
    return home() / "runs"


def every() -> list[Run]:
    """All runs, including damaged ones, oldest first."""
    try:
        folders = [path for path in runs_dir().iterdir() if NAME.fullmatch(path.name) and _is_run(path)]
    except FileNotFoundError:
        return []
    return [Run(path) for path in sorted(folders, key=lambda path: (_modified(path / "recipe.yaml", path), path.name))]


def _is_run(path: Path) -> bool:
    try:
        return path.is_dir() and any(os.path.lexists(path / name) for name in FILES)
    except PermissionError:
        return True  # listed as damaged, with the reason


def _modified(*paths: Path) -> float:
    """Modification time of the first readable path."""
    for path in paths:
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def _identity(identity: str) -> str:
    return json.dumps({"id": identity}) + "\n"


def create(name: str | None, recipe: Recipe, stem: str) -> Run:
    """Creates a run's folder. Of concurrent callers only one succeeds. Default names: `<stem>-1`, `<stem>-2`, …"""
    if name is not None and not NAME.fullmatch(name):
        raise UserError(
            f"'{name}' is not a valid run name.",
            "Use up to 63 letters, digits, '.', '_' and '-', starting with a letter or digit.",
        )
    runs_dir().mkdir(parents=True, exist_ok=True)
    number = 1
    while not _create_folder(path := runs_dir() / (name or f"{stem}-{number}")):
        if name is not None and not _is_run(path):
            raise UserError(f"{path} exists and is not a run.", "Move it, or choose another name (--run).")
        if name is not None:
            raise UserError(
                f"A run named '{name}' exists already.", f"Resume it (--resume {name}), or choose another name (--run)."
            )
        number += 1
    run = Run(path)
    try:
        write_atomic(run.path / "recipe.yaml", recipe_file.dump(recipe))
        run.write_running(State("running", steps=recipe.train.steps))
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def _create_folder(path: Path) -> bool:
    """Creates the folder and its id. Reuses an empty folder, which a kill can leave behind."""
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir() or any(path.iterdir()):
            return False
    try:
        with (path / "run.json").open("x") as file:
            file.write(_identity(uuid.uuid4().hex))
    except FileExistsError:
        return False
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    return True


def find(name: str) -> Run:
    if exists(name):
        return Run(runs_dir() / name)
    known = [r.name for r in every()]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else "See 'strata runs', or train one with 'make train'."
    raise UserError(f"There is no run '{name}'.", hint)


def exists(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and _is_run(runs_dir() / name)


def newest_with_export() -> Run:
    exported = [run for run in every() if run.has_export() and _has_recipe(run)]
    if not exported:
        raise UserError("There is no exported run to serve.", "Run 'make train' first, or pass a model folder (--model).")
    return exported[-1]


def _has_recipe(run: Run) -> bool:
    """True if the run's own recipe can be loaded, to serve it."""
    try:
        run.recipe()
    except (UserError, OSError):
        return False
    return True
