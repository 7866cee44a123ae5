"""`strata bench train`: all contenders do the same work, and the JSON is complete."""

import json
from pathlib import Path

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from strata.platform.cli import build
from strata.platform.errors import UserError
from strata.platform.recipe import MoESection, Recipe, WorkerCount
from strata.training.bench import launch, models
from strata.training.bench.bare import MasterAdamW
from strata.training.bench.compare import Settings, bench, obstacle
from strata.training.bench.contest import Job, accumulation, measure, shortened
from strata.training.metrics.records import Record

from ..conftest import SMALL

pytestmark = pytest.mark.slow


def changed(recipe: Recipe, section: str, **values: object) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def record(step: int, time: float) -> Record:
    return Record(step=step, loss=1.0 / step, lr=0.1, grad_norm=None, tokens_per_s=0.0, time=time)


def test_one_and_two_workers_learn_alike_and_the_json_is_complete(small_recipe: Recipe, corpus: Path, home: Path) -> None:
    losses = {}
    for workers in (1, 2):
        path = home / f"{workers}.json"
        short = ["--steps", "3", "--warmup", "1", "--rounds", "1", "--only", "bare", "--json", str(path)]
        settings = [*SMALL, f"data.path={corpus}", f"parallel.workers={workers}"]
        done = CliRunner().invoke(build(), ["bench", "train", *short, *settings])
        assert done.exit_code == 0, done.output or done.exception
        result = json.loads(path.read_text())
        [one] = result["contenders"]["bare"]["rounds"]
        losses[workers] = one["final_loss"]
        assert len(one["step_seconds"]) == 2 and one["peak_memory_bytes"] > 2**26
        tokens_per_step = small_recipe.train.batch * small_recipe.model.context
        assert result["contenders"]["bare"]["tokens_per_s"] == pytest.approx(tokens_per_step / (sum(one["step_seconds"]) / 2))
        assert 0 < result["contenders"]["bare"]["mfu"] < 1
        assert result["contenders"]["bare"]["ratio_to_bare"] == 1
        assert result["recipe"]["parallel"]["workers"] == workers and result["recipe"]["train"]["steps"] == 3
        assert result["machine"]["cores"] and result["versions"]["torch"] == torch.__version__ and result["date"]
    assert losses[1] == pytest.approx(losses[2], abs=1e-4)
    assert losses[1] < 6.2  # an untrained model is at log(512) = 6.24


@pytest.mark.rotation
def test_strata_does_the_same_work_as_the_bare_loop(small_recipe: Recipe, home: Path) -> None:
    recipe = changed(small_recipe, "parallel", workers=2)
    outcome = bench(recipe, Settings(steps=3, warmup=1, rounds=1), None)
    bare, ours = outcome.rounds["bare"][0], outcome.rounds["ours"][0]
    assert ours.final_loss == pytest.approx(bare.final_loss, abs=1e-4)
    assert len(ours.step_seconds) == len(bare.step_seconds) == 2
    assert outcome.left_out == {"liger": "its kernels need a GPU", "liger_compiled": "its kernels need a GPU"}
    assert outcome.ratio("ours", "bare") == pytest.approx(ours.tokens_per_s / bare.tokens_per_s)
    assert (home / ".strata" / "bench" / "train.json").is_file()
    assert not (home / "runs").exists()
    settings = Settings(steps=3, warmup=1, rounds=1, only=("ours_torch",), ray=False)
    [without_ray_on_torch] = bench(recipe, settings, None).rounds["ours_torch"]
    assert without_ray_on_torch.final_loss == pytest.approx(bare.final_loss, abs=1e-4)
    assert obstacle("ours_liger", recipe) == "its kernels need a GPU"


def test_hugging_face_model_has_the_same_initial_loss(small_recipe: Recipe) -> None:
    tokens = torch.randint(0, small_recipe.model.vocab, (2, small_recipe.model.context + 1))
    tokens_bt, targets_bt = tokens[:, :-1], tokens[:, 1:]
    ours = models.bare(small_recipe, torch.device("cpu"))(tokens_bt, targets_bt)
    theirs = models.WithFusedLoss(models.hugging_face(small_recipe))(tokens_bt, targets_bt)
    assert theirs.item() == pytest.approx(ours.item(), abs=1e-5)


def test_master_weights_accumulate_steps_too_small_for_bf16(small_recipe: Recipe) -> None:
    module = nn.ModuleDict({"norm": nn.LayerNorm(4, bias=False)}).to(torch.bfloat16)
    weight = module.norm.weight
    optimizer = MasterAdamW(module, small_recipe.train)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step(rate=1e-4)
    assert weight.dtype == torch.bfloat16
    assert weight[0].item() == pytest.approx(1 - 100 * 1e-4, abs=2**-8)
    assert weight[0].item() < 1


def test_shortened_recipe_only_trains(small_recipe: Recipe) -> None:
    train = shortened(changed(small_recipe, "train", warmup=7, steps=8, checkpoints="s3://bucket"), 5).train
    assert (train.steps, train.warmup, train.eval_every, train.checkpoint_every) == (5, 4, 5, 5)
    assert train.checkpoints is None


def test_step_time_is_the_difference_of_records(small_recipe: Recipe) -> None:
    history = [record(step, time) for step, time in enumerate([0.0, 9.0, 10.0, 12.0, 13.0], start=1)]
    one = measure(history, small_recipe, warmup=2)
    assert one.step_seconds == [1.0, 2.0, 1.0]
    assert one.tokens_per_s == small_recipe.train.batch * small_recipe.model.context
    assert one.final_loss == 1 / 5


def test_failed_contender_reports_its_error(small_recipe: Recipe, home: Path) -> None:
    recipe = changed(small_recipe, "parallel", workers=WorkerCount(2))
    job = Job(contender="bare", recipe=recipe, tokens=home / "nowhere", folder=home)
    with pytest.raises(launch.Failed, match=r"FileNotFoundError.*nowhere.*bare-\d\.log"):
        launch.run(job, with_ray=False, logs=home, step=lambda _: None)


def test_results_are_written_if_strata_fails(small_recipe: Recipe, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: Job, *_: object) -> list[Record]:
        if job.contender == "ours":
            raise launch.Failed("[out] of memory")
        return [record(step, float(step)) for step in range(1, 4)]

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(UserError, match=r"Strata's own training failed: \[out\] of memory"):
        bench(small_recipe, Settings(steps=3, warmup=1, rounds=2), home / "bench.json")
    result = json.loads((home / "bench.json").read_text())
    assert result["left_out"]["ours"] == "[out] of memory"
    assert len(result["contenders"]["bare"]["rounds"]) == 2


def test_interrupt_writes_the_rounds_so_far(small_recipe: Recipe, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = iter(["bare", "ours", "bare"])

    def run(job: Job, *_: object) -> list[Record]:
        if next(finished, None) is None:
            raise KeyboardInterrupt
        return [record(step, float(step)) for step in range(1, 4)]

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(typer.Exit):
        bench(small_recipe, Settings(steps=3, warmup=1, rounds=2), home / "bench.json")
    result = json.loads((home / "bench.json").read_text())
    assert result["partial"] is True
    assert {name: len(one["rounds"]) for name, one in result["contenders"].items()} == {"bare": 2, "ours": 1}


def test_liger_reports_why_it_cannot_run(small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = changed(small_recipe, "parallel", device="gpu")
    monkeypatch.setattr("strata.training.bench.compare.find_spec", lambda _: None)
    assert obstacle("liger", small_recipe) == "its kernels need a GPU"
    assert obstacle("liger", gpu) == obstacle("liger_compiled", gpu) == "liger-kernel is not installed"
    assert obstacle("liger", changed(gpu, "model", moe=MoESection(experts=2))) == "its Llama has no mixture of experts"
    assert obstacle("bare", gpu) is obstacle("ours", gpu) is None


def test_invalid_settings_are_refused(small_recipe: Recipe) -> None:
    with pytest.raises(UserError, match="leaves no step of --steps 3"):
        bench(small_recipe, Settings(steps=3, warmup=3), None)
    layout = changed(small_recipe, "parallel", workers=4, tensor=4)
    with pytest.raises(UserError, match="The peers are data parallel"):
        accumulation(changed(layout, "train", batch=6, micro_batch=2))
