"""Clients of experiment trackers: TensorBoard, Weights & Biases and MLflow.

A client continues the tracker's run when training resumes. Its calls may block and raise; `trackers.py` runs them on a thread.
"""

import html
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from strata.platform import recipe_file
from strata.platform.files import write_atomic
from strata.platform.runs import Run

PROJECT = "strata"  # default name of the project or experiment
MLFLOW_BATCH = 100  # MLflow accepts up to 1000 metrics and 100 parameters per request


@dataclass(frozen=True)
class Point:
    """Values of a step, recorded at the Unix time `at`. `samples` are continuations of prompts."""

    step: int
    at: float
    values: dict[str, float]
    samples: Mapping[str, str] = field(default_factory=dict)

    def sample_texts(self) -> Iterator[str]:
        """Each prompt and its continuation, as they are: a client shows them as preformatted text."""
        return (prompt + text for prompt, text in self.samples.items())


class Client(Protocol):
    def log(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


def open_client(name: str, run: Run, step: int) -> Client:
    """Opens the tracker for a run that continues after `step`."""
    clients: dict[str, type[TensorBoard | WeightsAndBiases | MLflow]] = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "mlflow": MLflow,
    }
    return clients[name](run, step)


class TensorBoard:
    """Event files in the run's folder. Written without tensorboardX's `SummaryWriter`: its thread dies on a full disk, and the
    queue before it then blocks forever."""

    def __init__(self, run: Run, step: int) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._summary, self._events = summary, event_pb2
        folder = run.path / "tensorboard"
        folder.mkdir(exist_ok=True)
        # The writer names files by the second, and replaces a file with the same name.
        self._writer: Any = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        restarted = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # TensorBoard drops the steps that are repeated
        self._write(step + 1, time.time(), session_log=restarted)
        recipe = f"```yaml\n{recipe_file.dump(run.recipe())}```"
        self._write(step, time.time(), summary=summary.text("recipe", recipe))

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.values.items():
                self._write(point.step, point.at, summary=self._summary.scalar(name, value))
            for number, text in enumerate(point.sample_texts(), 1):
                shown = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown for preformatted text
                self._write(point.step, point.at, summary=self._summary.text(f"samples/{number}", shown))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, at: float, **content: Any) -> None:
        self._writer.write_event(self._events.Event(step=step, wall_time=at, **content))


class WeightsAndBiases:
    """A run under the id of the training run. WANDB_MODE, WANDB_PROJECT and wandb's other variables apply."""

    def __init__(self, run: Run, step: int) -> None:
        import wandb

        self._html: Any = wandb.Html
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id(),
            name=run.name,
            dir=str(run.path),
            config=run.recipe().model_dump(mode="json"),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),  # the terminal belongs to the training
        )

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            texts = {
                f"samples/{number}": self._html(f"<pre>{html.escape(text)}</pre>")
                for number, text in enumerate(point.sample_texts(), 1)
            }
            self._run.log(point.values | texts, step=point.step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run on the server at MLFLOW_TRACKING_URI; by default in the folder `mlflow` of the training run. Its id is in the
    training run's `trackers.json`."""

    def __init__(self, run: Run, step: int) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = (run.path / "mlflow").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 recommends a database, which needs a server
        from mlflow import MlflowClient, entities

        self._entities: Any = entities
        self._client: Any = MlflowClient(tracking_uri=uri)
        self._run_id = self._continued(run) or self._created(run)

    def log(self, points: Sequence[Point]) -> None:
        metrics = (
            self._entities.Metric(name, value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        )
        while batch := list(islice(metrics, MLFLOW_BATCH)):
            self._client.log_batch(self._run_id, metrics=batch)
        for point in points:
            if point.samples:
                self._client.log_text(self._run_id, "\n\n".join(point.sample_texts()), f"samples/{point.step}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _continued(self, run: Run) -> str | None:
        """The id of the run that an earlier start created, unless the server no longer has it."""
        from mlflow.exceptions import MlflowException

        try:
            run_id = str(json.loads((run.path / "trackers.json").read_bytes())["mlflow"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run_id

    def _created(self, run: Run) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run_id = str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)
        write_atomic(run.path / "trackers.json", json.dumps({"mlflow": run_id}))
        parameters = iter(_flattened(run.recipe().model_dump(mode="json")))
        while batch := [self._entities.Param(key, str(value)) for key, value in islice(parameters, MLFLOW_BATCH)]:
            self._client.log_batch(run_id, params=batch)
        return run_id


def _flattened(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values, as in overrides of a recipe."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
