"""A run is one folder: `runs/<name>/{recipe.yaml, state.json, metrics.jsonl, loss.png, checkpoints/, export/}`."""

import difflib
import json
import os
import re
import shutil
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import yaml

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.files import home, write_atomic
from strata.platform.processes import is_alive
from strata.platform.recipe import Recipe

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class State:
    """What the driver last said of a run. `pid` and `pid_created` tell a live driver from a number used again, on the machine
    called `host`: on a cluster each pod is one."""

    status: str  # running | finished | interrupted | failed
    step: int = 0
    steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    pid: int = 0
    pid_created: float = 0.0
    host: str = ""  # of states written before hosts were: this one

    def elsewhere(self) -> bool:
        """Whether it was last heard of as running on another machine, whose processes cannot be seen from here."""
        return self.status == "running" and self.host not in ("", socket.gethostname())

    def seen_now(self) -> str:
        """A driver that was killed could not write so: 'running' without its process is 'killed'."""
        if self.elsewhere():
            return f"running on {self.host}"
        if self.status == "running" and not is_alive(self.pid, self.pid_created):
            return "killed"
        return self.status


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
        return recipe_file.check(yaml.safe_load((self.path / "recipe.yaml").read_text()), f"of run {self.name}")

    def state(self) -> State:
        return State(**json.loads((self.path / "state.json").read_text()))

    def say(self, state: State) -> None:
        write_atomic(self.path / "state.json", json.dumps(asdict(state)))

    def say_running(self, state: State) -> None:
        me = psutil.Process(os.getpid())
        self.say(replace(state, status="running", pid=me.pid, pid_created=me.create_time(), host=socket.gethostname()))

    def remove(self) -> None:
        shutil.rmtree(self.path)


def runs_dir() -> Path:
    return home() / "runs"


def every() -> list[Run]:
    """Oldest first, by when the run was created."""
    folders = [p.parent for p in runs_dir().glob("*/state.json")]
    return [Run(path) for path in sorted(folders, key=lambda p: (p / "recipe.yaml").stat().st_mtime)]


def create(name: str | None, recipe: Recipe, stem: str) -> Run:
    """Takes the folder with mkdir, which only one process can win. Without a name: `<stem>-1`, `<stem>-2`, …"""
    if name is not None and not NAME.fullmatch(name):
        raise UserError(
            f"'{name}' cannot name a run.", "Use letters, digits, '.', '_' and '-', at most 63, a letter or digit first."
        )
    runs_dir().mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        run = Run(runs_dir() / (name or f"{stem}-{number}"))
        try:
            run.path.mkdir()
            break
        except FileExistsError:
            if name is not None:
                raise UserError(
                    f"A run named '{name}' exists already.", f"Go on with it (--resume {name}), or choose another name (--run)."
                ) from None
            number += 1
    write_atomic(run.path / "recipe.yaml", recipe_file.dump(recipe))
    run.say_running(State("running", steps=recipe.train.steps))
    return run


def find(name: str) -> Run:
    if exists(name):
        return Run(runs_dir() / name)
    known = [r.name for r in every()]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else "See 'strata runs', or train one with 'make train'."
    raise UserError(f"There is no run '{name}'.", hint)


def exists(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and (runs_dir() / name / "state.json").is_file()


def newest_with_export() -> Run:
    exported = [run for run in every() if (run.export / "config.json").is_file()]
    if not exported:
        raise UserError(
            "Nothing is trained yet, so there is nothing to serve.", "Run 'make train' first, or give a model folder (--model)."
        )
    return exported[-1]
