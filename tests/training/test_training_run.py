"""Real training runs: learning, interruption, resume and export. Tests of signals use the command line.

The tests share a Ray cluster, except for the run that is killed: its own cluster must end with it.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from listening import reachable_from_outside
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from strata.platform import runs
from strata.platform.ray_cluster import cluster
from strata.platform.recipe import Recipe
from strata.platform.runs import Run
from strata.training import driver
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.data.windows import Windows
from strata.training.evaluation import samples
from strata.training.logs import attempts, reading
from strata.training.metrics import records
from strata.training.model.llama import token_losses

from .conftest import SMALL, strata_process

pytestmark = pytest.mark.slow

ENDLESS = "train.steps=100000"


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRATA_HOME", str(tmp_path_factory.mktemp("cluster")))
        yield cluster.start(cpus=2).address
        cluster.stop()


@pytest.fixture
def on_shared_cluster(shared_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", shared_cluster)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 180) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def steps_of(run: Run) -> list[int]:
    return [record["step"] for record in records.read(run.metrics)]


def loss_of_export(run: Run, recipe: Recipe) -> float:
    """Validation loss of the exported folder, computed with `transformers`."""
    tokens = shards.prepare(open_corpus(recipe.data), recipe.model.vocab, recipe.data.holdout)
    windows = Windows(tokens, "validation", recipe.model.context)
    batch = torch.from_numpy(windows.read(windows.evenly(recipe.train.eval_sequences)))
    model = AutoModelForCausalLM.from_pretrained(run.export)
    with torch.no_grad():
        return token_losses(model(batch[:, :-1]).logits, batch[:, 1:]).mean().item()


@pytest.fixture(scope="module")
def ending() -> Iterator[list[psutil.Process]]:
    """Ray's agents, which check for their raylet only once a minute: they may take until the end of the module to exit."""
    agents: list[psutil.Process] = []
    yield agents
    assert not psutil.wait_procs(agents, timeout=120)[1]


def test_ctrl_c_saves_and_a_killed_run_resumes(
    home: Path, corpus: Path, shared_cluster: str, ending: list[psutil.Process]
) -> None:
    settings = [*SMALL, f"data.path={corpus}", ENDLESS, "train.checkpoint_every=10", "train.keep=2"]
    settings += ["train.samples.prompts=[the cat, where rain]", "train.samples.tokens=4"]
    process = strata_process(home, "train", "--run", "r", *settings, address=shared_cluster)
    run = Run(home / "runs" / "r")
    wait_for(lambda: len(records.read(run.metrics)) >= 3, process)
    os.killpg(process.pid, signal.SIGINT)  # to the whole group, like a terminal
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "strata train --resume r" in output
    state, stopped_at = run.state(), steps_of(run)[-1]
    assert (state.status, state.step) == ("interrupted", stopped_at)
    assert (run.checkpoints / f"step-{stopped_at:08}").exists()
    assert not (run.path / "stop").exists()

    process = strata_process(home, "train", "--resume", "r")
    wait_for(lambda: steps_of(run)[-1] > stopped_at + 25, process)
    assert reachable_from_outside(psutil.Process(process.pid)) == []
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    agents = [member for member in family if member.is_running() and member.name().endswith("Agent")]
    ending += agents
    assert not psutil.wait_procs(set(family) - set(agents), timeout=30)[1]
    assert run.state().observed_status() == "killed"
    assert len(list(run.checkpoints.glob("step-*"))) <= 4  # two, the best one, and one that may be in progress

    last = steps_of(run)[-1] + 3
    process = strata_process(home, "train", "--resume", "r", f"train.steps={last}", address=shared_cluster)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert steps_of(run) == list(range(1, last + 1))
    evaluated = [record["step"] for record in records.read(run.metrics) if "val_loss" in record]
    assert [sample["step"] for sample in samples.read(run)] == [step for step in evaluated for _ in ("the cat", "where rain")]
    assert output.count("'where rain' continues '") == sum(step > stopped_at for step in evaluated if f"step {step}/" in output)
    assert run.state().status == "finished" and runs.newest_with_export() == run


@pytest.mark.usefixtures("on_shared_cluster")
def test_run_learns_exports_and_repeats_steps_after_damage(small_recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    summary = driver.start(small_recipe, "first", "test", Console())
    run = summary.run
    history = records.read(run.metrics)
    assert [record["step"] for record in history] == list(range(1, 9))
    assert [record["step"] for record in history if "val_loss" in record] == [4, 8]
    assert history[-1]["loss"] < history[0]["loss"]
    assert run.state().status == "finished" and run.plot.exists() and not (run.path / "stop").exists()
    assert loss_of_export(run, small_recipe) == pytest.approx(summary.val_loss, abs=1e-4)
    assert AutoTokenizer.from_pretrained(run.export).decode([0]) == "<|endoftext|>"

    # The last checkpoint is truncated: the run resumes from the previous one and repeats the same steps.
    weights = run.checkpoints / "step-00000008" / "part-00001.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    again = driver.resume(run, small_recipe, Console())
    assert "step-00000008 is damaged" in capsys.readouterr().out
    repeated = records.read(run.metrics)
    assert [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in repeated] == [
        (r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in history
    ]
    assert again.val_loss == summary.val_loss
    shown = list(reading.lines(reading.Selection(run.name, attempt=1, rank=0)))  # as 'strata logs' prints them
    assert b"rank 0: process" in shown[0] and len(shown) > 1 and len(attempts.every(attempts.folder(run))) == 2


@pytest.mark.rotation
@pytest.mark.usefixtures("on_shared_cluster")
def test_run_resumes_in_another_layout_from_a_uri(small_recipe: Recipe, tmp_path: Path) -> None:
    def changed(**parallel: int) -> Recipe:
        train = small_recipe.train.model_copy(update={"checkpoints": f"local://{tmp_path}/bucket"})
        model = small_recipe.model.model_copy(update={"tie_embeddings": False})
        layout = small_recipe.parallel.model_copy(update=parallel)
        return small_recipe.model_copy(update={"parallel": layout, "train": train, "model": model})

    serial = driver.start(changed(workers=1, zero=0), "serial", "test", Console(quiet=True))
    sharded = driver.start(changed(zero=3), "sharded", "test", Console(quiet=True))
    assert loss_of_export(sharded.run, changed()) == pytest.approx(sharded.val_loss, abs=1e-4)

    shutil.rmtree(tmp_path / "bucket" / "sharded" / "step-00000008")
    split = driver.resume(sharded.run, changed(tensor=2), Console(quiet=True))
    losses, expected = ([r["loss"] for r in records.read(run.metrics)] for run in (split.run, serial.run))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert loss_of_export(split.run, changed()) == pytest.approx(split.val_loss, abs=1e-4)
