"""Experiment trackers: event files read back, the calls of wandb and MLflow, and failures that must not reach training."""

import json
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.platform.runs import Run
from strata.training.metrics import tracker_clients, trackers
from strata.training.metrics.records import Record
from strata.training.metrics.tracker_clients import Client, Point
from strata.training.metrics.trackers import Trackers

from ..conftest import SMALL
from ..faults import StandIn, strata, without_ray


@pytest.fixture
def run(home: Path) -> Run:
    return runs.create("r", recipe_file.load("laptop", ["train.steps=30"]), "r")


def record(step: int, **more: object) -> Record:
    return Record(step=step, loss=3.0, lr=0.1, grad_norm=1.5, tokens_per_s=100.0, time=1000.0 + step, **more)  # type: ignore[typeddict-item]


class Memory:
    """A tracker in memory."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.opened: list[tuple[str, str, int]] = []
        self.closed = 0

    def __call__(self, name: str, run: Run, step: int) -> Client:
        self.opened.append((name, run.name, step))
        return self

    def log(self, points: Sequence[Point]) -> None:
        self.points += points

    def close(self) -> None:
        self.closed += 1


def test_values_of_a_record() -> None:
    plain = {"loss": 3.0, "lr": 0.1, "grad_norm": 1.5, "tokens_per_s": 100.0}
    assert trackers.values(record(1)) == plain
    full = trackers.values(
        record(1, val_loss=0.0, mfu=0.25, peak_memory_bytes=3 * 2**30, checkpoint_s=1.0, seconds={"data": 1.0})
    )
    assert full == plain | {"val_loss": 0.0, "perplexity": 1.0, "mfu": 0.25, "peak_memory_gib": 3.0}
    preferences = trackers.values(record(1, val_loss=0.5, preference={"margin": 2.0, "accurate": 1}))
    assert preferences == plain | {"val_loss": 0.5, "preference/margin": 2.0, "preference/accurate": 1.0}
    distilled = trackers.values(record(1, val_loss=0.0, distillation={"kl": 0.5, "agreement": 0.75}))
    assert distilled == plain | {
        "val_loss": 0.0,
        "perplexity": 1.0,
        "distillation/kl": 0.5,
        "distillation/agreement": 0.75,
    }
    unknown = record(1, val_loss=1e6)
    unknown["grad_norm"] = None
    assert trackers.values(unknown) == {"loss": 3.0, "lr": 0.1, "tokens_per_s": 100.0, "val_loss": 1e6}


def test_every_record_arrives_in_order_and_the_tracker_is_closed(run: Run) -> None:
    memory = Memory()
    with Trackers(run, ["wandb"], opened=memory) as feed:
        for step in range(7, 60):
            feed.record(record(step))
    assert [(point.step, point.at) for point in memory.points] == [(step, 1000.0 + step) for step in range(7, 60)]
    assert memory.opened == [("wandb", "r", 6)] and memory.closed == 1


def test_a_tracker_named_twice_is_opened_once(run: Run) -> None:
    memory = Memory()
    with Trackers(run, ["mlflow", "wandb", "mlflow"], opened=memory) as feed:
        feed.record(record(1))
    assert sorted(memory.opened) == [("mlflow", "r", 0), ("wandb", "r", 0)]


def test_a_run_without_a_step_opens_no_tracker(run: Run) -> None:
    memory = Memory()
    with Trackers(run, ["wandb"], opened=memory):
        pass
    assert not memory.opened and not memory.closed


class Failing(Memory):
    """Fails with the given error in one of its calls; a log call fails from the second on."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error, self.logs = where, error, 0

    def __call__(self, name: str, run: Run, step: int) -> Client:
        if self.where == "open":
            raise self.error
        return super().__call__(name, run, step)

    def log(self, points: Sequence[Point]) -> None:
        self.logs += 1
        if self.where == "log" and self.logs > 1:
            raise self.error
        super().log(points)

    def close(self) -> None:
        if self.where == "close":
            raise self.error


@pytest.mark.parametrize("where", ["open", "log", "close"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SystemExit(1), ConnectionError("a\nb" * 400), KeyError()]
)
def test_a_tracker_that_fails_prints_one_line_and_is_switched_off(run: Run, where: str, error: BaseException) -> None:
    printed, failing, healthy = [], Failing(where, error), Memory()
    with Trackers(
        run, ["wandb", "mlflow"], printed.append, lambda name, *rest: {"wandb": failing, "mlflow": healthy}[name](name, *rest)
    ) as feed:
        for step in range(1, 30):
            feed.record(record(step))
            time.sleep(0.002)
    [line] = printed
    assert (
        line.startswith("Tracker wandb failed and is switched off; training continues. ") and len(line) < 300 and "\n" not in line
    )
    assert line.count(type(error).__name__) == 1 and not line.endswith(":")
    assert [point.step for point in healthy.points] == list(range(1, 30)) and healthy.closed == 1


class Hanging(Memory):
    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def log(self, points: Sequence[Point]) -> None:
        assert self.release.wait(60)


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    monkeypatch.setattr(trackers, "MOST_QUEUED", 10)
    printed, hanging = [], Hanging()
    begin = time.monotonic()
    with Trackers(run, ["wandb"], printed.append, hanging) as feed:
        for step in range(1, 200):
            feed.record(record(step))
    took = time.monotonic() - begin
    hanging.release.set()
    assert 0.2 <= took < 10
    assert printed[0].startswith("Tracker wandb is 10 steps behind") and "not sent within" in printed[1] and len(printed) == 2


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "mlflow" else object())
    trackers.require_installed(())
    trackers.require_installed(("tensorboard", "wandb"))
    with pytest.raises(UserError) as caught:
        trackers.require_installed(("tensorboard", "mlflow"))
    assert "train.trackers has mlflow" in caught.value.cause and "uv pip install mlflow-skinny" in caught.value.fix


def test_only_known_trackers_are_accepted() -> None:
    assert recipe_file.load("laptop", ["train.trackers=[tensorboard, wandb]"]).train.trackers == ("tensorboard", "wandb")
    assert recipe_file.load("laptop").train.trackers == ()
    with pytest.raises(UserError, match=r"train\.trackers"):
        recipe_file.load("laptop", ["train.trackers=[comet]"])


# TensorBoard


def events(folder: Path) -> Iterator[Any]:
    """Events of a folder's files, oldest file first, as TensorBoard reads them."""
    from tensorboardX.proto import event_pb2

    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
        assert at == len(data)


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Scalars by name and step, after the purge at the start of each session."""
    found: dict[tuple[str, int], float] = {}
    for event in events(folder):
        if event.HasField("session_log"):
            found = {key: value for key, value in found.items() if key[1] < event.step}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found[value.tag, event.step] = value.simple_value
    return found


def test_tensorboard_files_are_read_back(run: Run) -> None:
    with Trackers(run, ["tensorboard"]) as feed:
        feed.record(record(1))
        feed.record(record(2, val_loss=0.0, mfu=0.5, peak_memory_bytes=2**30), {"def f(": "):\n<b>"})
    names = {"loss": 3.0, "lr": pytest.approx(0.1), "grad_norm": 1.5, "tokens_per_s": 100.0}
    expected = {(name, step): value for name, value in names.items() for step in (1, 2)}
    expected |= {("val_loss", 2): 0.0, ("perplexity", 2): 1.0, ("mfu", 2): 0.5, ("peak_memory_gib", 2): 1.0}
    assert scalars(run.path / "tensorboard") == expected
    texts = [value for event in events(run.path / "tensorboard") for value in event.summary.value if value.HasField("tensor")]
    assert "steps: 30" in texts[0].tensor.string_val[0].decode()
    assert (texts[1].tag, texts[1].tensor.string_val[0]) == ("samples/1/text_summary", b"    def f():\n    <b>\n")
    times = {event.wall_time for event in events(run.path / "tensorboard") if event.step == 2 and event.summary.value}
    assert times == {1002.0}


def test_resumed_run_replaces_the_steps_that_it_repeats_in_tensorboard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, steps, loss in ((1, range(1, 7), 3.0), (2, range(5, 6), 2.0)):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)  # the worker was started again, in the same second
        with Trackers(run, ["tensorboard"]) as feed:
            for step in steps:
                feed.record(record(step) | {"loss": loss})  # type: ignore[arg-type]
    assert len(list((run.path / "tensorboard").iterdir())) == 2
    found = scalars(run.path / "tensorboard")
    assert {step: value for (name, step), value in found.items() if name == "loss"} == {1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0, 5: 2.0}


def test_tensorboard_without_space_is_switched_off(run: Run) -> None:
    (run.path / "tensorboard").symlink_to("/dev/full")
    printed: list[str] = []
    with Trackers(run, ["tensorboard"], printed.append) as feed:
        feed.record(record(1))
    [line] = printed
    assert "Tracker tensorboard failed" in line


# Weights & Biases, MLflow: modules with the part of their interface that is used.


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def Html(self, text: str) -> str:
        return f"html: {text}"

    def init(self, **given: Any) -> Any:
        self.calls.append(("init", given))
        return SimpleNamespace(
            log=lambda values, step: self.calls.append(("log", (step, values))),
            finish=lambda: self.calls.append(("finish", None)),
        )


def test_wandb_has_the_recipe_and_continues_under_the_id_of_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for step in (1, 2):
        with Trackers(run, ["wandb"]) as feed:
            feed.record(record(step), {"def f(": "):\n<b>"} if step == 2 else None)
        monkeypatch.setenv("WANDB_PROJECT", "mine")
    kinds = [kind for kind, _ in wandb.calls]
    assert kinds == ["init", "log", "finish"] * 2
    first, second = (given for kind, given in wandb.calls if kind == "init")
    assert first["id"] == second["id"] == run.id() and first["resume"] == "allow" and first["dir"] == str(run.path)
    assert first["config"]["train"]["steps"] == 30 and first["name"] == "r"
    assert (first["project"], second["project"]) == ("strata", "mine")
    assert wandb.calls[1] == ("log", (1, trackers.values(record(1))))
    sample = {"samples/1": "html: <pre>def f():\n&lt;b&gt;</pre>"}
    assert wandb.calls[4] == ("log", (2, trackers.values(record(2)) | sample))


class Error(Exception):
    def __init__(self, error_code: str) -> None:
        super().__init__(error_code)
        self.error_code = error_code


class FakeMLflow:
    """Server with experiments and runs, and the modules of its client."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.uris: list[str] = []
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        entities = ModuleType("mlflow.entities")
        entities.Metric = lambda *given: given  # type: ignore[attr-defined]
        entities.Param = lambda *given: given  # type: ignore[attr-defined]
        exceptions = ModuleType("mlflow.exceptions")
        exceptions.MlflowException = Error  # type: ignore[attr-defined]
        mlflow = ModuleType("mlflow")
        mlflow.MlflowClient, mlflow.entities = self.client, entities  # type: ignore[attr-defined]
        for module in (mlflow, entities, exceptions):
            patch.setitem(sys.modules, module.__name__, module)

    def client(self, tracking_uri: str) -> "FakeMLflow":
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        assert experiment_id in self.experiments.values()
        run_id = f"id{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "status": "RUNNING", "metrics": [], "params": {}, "batches": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        if run_id not in self.runs:
            raise Error("RESOURCE_DOES_NOT_EXIST")
        self.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        assert 0 < len(metrics) + len(params) <= 100
        here = self.runs[run_id]
        assert here["status"] == "RUNNING"
        here["metrics"] += metrics
        for key, value in params:
            assert isinstance(value, str) and key not in here["params"]  # parameters of a run cannot be changed
            here["params"][key] = value

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self.runs[run_id]["texts"] = {artifact_file: text}

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["status"] = "FINISHED"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    return FakeMLflow(monkeypatch)


def test_mlflow_continues_its_run_and_has_the_recipe(run: Run, mlflow: FakeMLflow) -> None:
    for steps in (range(1, 80), range(60, 62)):
        with Trackers(run, ["mlflow"]) as feed:
            for step in steps:
                feed.record(record(step), {"a": "b", "c\n": "d"} if step == 61 else None)
    [(run_id, found)] = mlflow.runs.items()
    assert json.loads((run.path / "trackers.json").read_text()) == {"mlflow": run_id}
    assert found["status"] == "FINISHED" and found["name"] == "r" and mlflow.experiments == {"strata": "0"}
    assert [(step, at) for name, _, at, step in found["metrics"] if name == "loss"] == [
        (step, 1_000_000 + 1000 * step) for step in (*range(1, 80), 60, 61)
    ]
    assert found["params"]["train.steps"] == "30" and found["params"]["serve.decode.replicas"] == "1"
    assert set(mlflow.uris) == {(run.path / "mlflow").as_uri()} and found["texts"] == {"samples/61.txt": "ab\n\nc\nd"}


def test_mlflow_uses_its_server_and_starts_anew_on_another(run: Run, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    for content in ('{"mlflow": "of another server"}', "[]", "{", '{"mlflow": "id0"}'):
        (run.path / "trackers.json").write_text(content)
        with Trackers(run, ["mlflow"]) as feed:
            feed.record(record(1))
    assert set(mlflow.uris) == {"http://tracking.example"} and mlflow.experiments == {"mine": "0"}
    assert list(mlflow.runs) == ["id0", "id1", "id2"] and len(mlflow.runs["id0"]["metrics"]) == 8


def test_mlflow_that_refuses_a_run_is_switched_off(run: Run, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run_id: str, status: str) -> None:
        raise Error("PERMISSION_DENIED")

    monkeypatch.setattr(mlflow, "update_run", refuse)
    (run.path / "trackers.json").write_text('{"mlflow": "theirs"}')
    printed: list[str] = []
    with Trackers(run, ["mlflow"], printed.append) as feed:
        feed.record(record(1))
    assert not mlflow.runs and len(printed) == 1 and "PERMISSION_DENIED" in printed[0]


# The training loop


def test_training_forwards_each_step_once_and_resumes_under_the_same_run(
    home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ray(monkeypatch)
    monkeypatch.setattr(tracker_clients.os, "getpid", lambda: 1)
    StandIn.hooks = {6: (home / "runs" / "r" / "stop").touch}
    assert strata("train", "--run", "r", *SMALL, f"data.path={corpus}", "train.trackers=[tensorboard]") == 130
    run = Run(home / "runs" / "r")
    (run.path / "stop").unlink()
    assert {step for name, step in scalars(run.path / "tensorboard") if name == "loss"} == set(range(1, 7))
    monkeypatch.setattr(tracker_clients.os, "getpid", lambda: 2)
    assert strata("train", "--resume", "r") == 0
    found = scalars(run.path / "tensorboard")
    assert {step for name, step in found if name == "loss"} == set(range(1, 9))
    assert {step for name, step in found if name == "perplexity"} == {4, 6, 8}


def test_training_does_not_start_without_the_package(
    home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_ray(monkeypatch)
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert strata("train", "--run", "r", *SMALL, f"data.path={corpus}", "train.trackers=[wandb]") == 1
    assert "uv pip install wandb" in capsys.readouterr().err and not (home / "runs" / "r").exists()


def test_a_failing_tracker_does_not_change_the_run(home: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)
    monkeypatch.setattr(trackers, "find_spec", lambda name: object())
    broken = FakeWandb()
    monkeypatch.setattr(broken, "init", lambda **given: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", broken)
    assert strata("train", "--run", "r", *SMALL, f"data.path={corpus}", "train.trackers=[wandb]") == 0
    run = Run(home / "runs" / "r")
    assert run.state().status == "finished" and run.has_export()


def test_recipe_of_the_run_is_the_configuration(run: Run) -> None:
    recipe: Recipe = run.recipe()
    flat = dict(tracker_clients._flattened(recipe.model_dump(mode="json")))
    assert flat["model.layers"] == recipe.model.layers and flat["train.trackers"] == [] and not any("{" in key for key in flat)
