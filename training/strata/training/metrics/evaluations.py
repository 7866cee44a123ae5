"""Evaluations of a run by `strata eval`: one JSON file each, in the folder `evaluations` of the run."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from strata.platform.files import write_atomic
from strata.platform.runs import Run


@dataclass(frozen=True)
class Score:
    """A metric of a task, or of a group of tasks."""

    task: str
    metric: str
    value: float
    stderr: float | None
    samples: int
    shots: int | None = None  # None for a group
    version: str | None = None
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class Settings:
    """Options of an evaluation that change its scores."""

    tasks: tuple[str, ...]
    limit: int | None = None  # samples of each task
    shots: int | None = None  # None: as many as each task defines
    chat: bool = False
    truncate: bool = False


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model. `subject` is a run's name, a folder or an address, and `step` the step of the run's checkpoint that was
    exported. `truncated` counts the requests that lost the beginning of their prompt. The other fields are the header of
    every benchmark."""

    benchmark: str
    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    subject: str
    step: int | None
    settings: Settings
    seconds: float
    truncated: int
    scores: tuple[Score, ...]


_EVALUATION = TypeAdapter(Evaluation)


def folder(run: Run) -> Path:
    return run.path / "evaluations"


def dump(evaluation: Evaluation) -> str:
    return json.dumps(asdict(evaluation), indent=2) + "\n"


def write(folder: Path, evaluation: Evaluation) -> Path:
    """Writes a new file, named after the time and a digest. Names sort by time."""
    text = dump(evaluation)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    at = "".join(each for each in evaluation.date.partition("+")[0] if each.isalnum())
    path = folder / f"{at}-{digest}.json"
    write_atomic(path, text)
    return path


def read(path: Path) -> Evaluation:
    """Raises OSError or ValueError for a file that cannot be read."""
    return _EVALUATION.validate_json(path.read_bytes())


def read_all(run: Run, say: Callable[[str], None] = lambda _: None) -> list[Evaluation]:
    """A run's evaluations, oldest first, except damaged files."""
    found = []
    for path in sorted(folder(run).glob("*.json")):
        try:
            found.append(read(path))
        except (OSError, ValidationError) as error:
            say(f"{path} cannot be read and is left out: {str(error).splitlines()[0]}")
    return found


def newest(evaluations: Iterable[Evaluation]) -> dict[tuple[str, str], tuple[Evaluation, Score]]:
    """The last score of each task and metric, of evaluations from oldest to newest."""
    found: dict[tuple[str, str], tuple[Evaluation, Score]] = {}
    for evaluation in evaluations:
        for score in evaluation.scores:
            found[score.task, score.metric] = evaluation, score
    return found
