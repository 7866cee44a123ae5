"""Figures of the training benchmarks from recorded rounds. Nothing trains."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from strata.platform.errors import UserError
from strata.platform.recipe import MoESection, Recipe
from strata.training.bench import launch, models, report, stalls
from strata.training.bench.contest import Contender, Job, Round, accumulation, measure, on_kernels_of, shortened
from strata.training.bench.report import Outcome
from strata.training.metrics.records import Record


def changed(recipe: Recipe, section: str, **values: object) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def record(step: int, time: float, **more: float) -> Record:
    return Record(step=step, loss=1.0 / step, lr=0.1, grad_norm=None, tokens_per_s=0.0, time=time, **more)  # type: ignore[typeddict-item]


def rounds(*speeds: float, loss: float = 2.5, memory: int | None = 3 * 2**29) -> list[Round]:
    return [Round([0.5], speed, loss, memory) for speed in speeds]


@pytest.fixture
def outcome(small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Two workers. 1000 tokens/s are 1000 x 6e6 / (2 x 1e10) = 30% of their peak."""
    monkeypatch.setattr(report, "flops_per_token", lambda *_: 6_000_000)
    by: dict[Contender, list[Round]] = {
        "ours": rounds(900, 1000, 4000),
        "bare": rounds(700, 800, memory=None),
        "liger": rounds(400),
        "liger_compiled": rounds(500),
    }
    left_out: dict[Contender, str] = {"ours_liger": "its kernels need a GPU"}
    return Outcome(changed(small_recipe, "parallel", workers=2), 3, True, by, left_out, 1e10)


def test_figures_are_medians_of_rounds(outcome: Outcome) -> None:
    assert [outcome.tokens_per_s(name) for name in ("ours", "bare", "liger", "ours_liger")] == [1000, 750, 400, None]
    assert outcome.mfu("ours") == pytest.approx(0.3) and outcome.mfu("ours_liger") is None
    assert Outcome(outcome.recipe, 3, True, outcome.rounds, {}, None).mfu("ours") is None


def test_ratio_is_to_the_fastest_peer_that_ran(outcome: Outcome) -> None:
    assert outcome.ratio("ours", "bare") == pytest.approx(4 / 3)
    assert outcome.ratio("ours", "liger", "liger_compiled", "ours_liger") == 2
    assert outcome.ratio("ours", "ours_liger") is None and outcome.ratio("ours_liger", "bare") is None


def rows(outcome: Outcome) -> list[list[str]]:
    columns = report.table(outcome).columns
    return [list(row) for row in zip(*(column.cells for column in columns), strict=True)]  # type: ignore[arg-type]


def test_table_has_a_row_for_every_contender(outcome: Outcome) -> None:
    assert rows(outcome) == [
        ["strata train", "1,000", "30.0%", "1.50 GiB", "2.5000", "1.33", "2.00"],
        ["bare torch", "750", "22.5%", "-", "2.5000", "1.00", "1.50"],
        ["Liger", "400", "12.0%", "1.50 GiB", "2.5000", "0.53", "0.80"],
        ["Liger, compiled", "500", "15.0%", "1.50 GiB", "2.5000", "0.67", "1.00"],
        ["strata train, Liger's kernels", "-", "-", "-", "-", "-", "-"],
    ]
    assert str(report.table(outcome).caption) == "strata train, Liger's kernels not run: its kernels need a GPU"


def test_table_shows_the_last_round(outcome: Outcome) -> None:
    mixed = [Round([0.5], 1000, 9.0, 2**40), Round([0.5], 1000, 1.25, 2**30)]
    found = Outcome(outcome.recipe, 3, False, {"ours_torch": mixed}, {}, None)
    assert rows(found) == [["strata without Ray, torch's kernels", "1,000", "-", "1.00 GiB", "1.2500", "-", "-"]]
    assert report.table(found).caption is None


def test_json_has_every_figure(outcome: Outcome) -> None:
    found = report.as_json(outcome)
    assert json.loads(json.dumps(found)) == found
    assert (found["warmup_steps"], found["with_ray"], found["partial"]) == (3, True, False)
    assert (found["flops_per_token"], found["peak_flops_per_worker"]) == (6_000_000, 1e10)
    assert found["left_out"] == {"ours_liger": "its kernels need a GPU"} and found["recipe"]["parallel"]["workers"] == 2
    ours = found["contenders"]["ours"]
    assert (ours["name"], ours["tokens_per_s"], ours["ratio_to_liger"]) == ("strata train", 1000, 2)
    assert (ours["mfu"], ours["ratio_to_bare"]) == pytest.approx((0.3, 4 / 3))
    assert [one["tokens_per_s"] for one in ours["rounds"]] == [900, 1000, 4000]


def test_times_are_between_records_after_the_warmup(small_recipe: Recipe) -> None:
    """Records at 0, 9, 10, 12, 17 and 18 s; the first record and the first two times belong to a warm-up of 3 steps."""
    history = [record(step, at, peak_memory_bytes=step) for step, at in enumerate((0.0, 9.0, 10.0, 12.0, 17.0, 18.0), 1)]
    recipe = changed(changed(small_recipe, "train", batch=6), "model", context=20)
    assert measure(history, recipe, warmup=3) == Round([2.0, 5.0, 1.0], 60.0, 1 / 6, 6)
    assert measure(history, recipe, warmup=1).step_seconds == [9.0, 1.0, 2.0, 5.0, 1.0]
    assert measure([record(1, 0.0), record(2, 3.0)], recipe, 1).peak_memory_bytes is None


@pytest.mark.parametrize(("before", "warmup"), [(2, 2), (6, 6), (7, 6), (100, 6)])
def test_shortened_recipe_has_one_evaluation_and_one_checkpoint(small_recipe: Recipe, before: int, warmup: int) -> None:
    recipe = changed(small_recipe, "train", warmup=before, steps=1000, time_budget_s=9, checkpoints="s3://bucket", max_failures=4)
    short = shortened(recipe, 7)
    own = {"steps": 7, "warmup": warmup, "eval_every": 7, "eval_sequences": 1, "checkpoint_every": 7}
    assert short == changed(recipe, "train", **own, time_budget_s=None, checkpoints=None, max_failures=0)


@pytest.mark.parametrize(("contender", "kernels"), [("ours", "strata"), ("ours_torch", "torch"), ("ours_liger", "liger")])
def test_kernels_of_a_contender(small_recipe: Recipe, contender: Contender, kernels: str) -> None:
    recipe = changed(small_recipe, "train", kernels="strata")
    assert on_kernels_of(contender, recipe).train.kernels == kernels


@pytest.mark.parametrize(("workers", "tensor", "batch", "steps"), [(1, 1, 12, 4), (2, 1, 12, 2), (4, 4, 12, 1), (2, 2, 24, 4)])
def test_peers_accumulate_as_data_parallel_workers(
    small_recipe: Recipe, workers: int, tensor: int, batch: int, steps: int
) -> None:
    recipe = changed(changed(small_recipe, "train", batch=batch, micro_batch=3), "parallel", workers=workers, tensor=tensor)
    found = accumulation(recipe)
    assert found == steps and isinstance(found, int)


def test_peers_refuse_a_batch_that_workers_cannot_divide(small_recipe: Recipe) -> None:
    recipe = changed(changed(small_recipe, "train", batch=8, micro_batch=3), "parallel", workers=2)
    with pytest.raises(UserError, match=r"train\.batch=8 must be a multiple of parallel\.workers x train\.micro_batch = 6"):
        accumulation(recipe)


def test_records_of_a_job_are_in_its_folder(small_recipe: Recipe) -> None:
    job = Job(contender="bare", recipe=small_recipe, tokens=Path("/tokens"), folder=Path("/bench/bare"))
    assert job.metrics == Path("/bench/bare/metrics.jsonl")


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_precision_of_peers(small_recipe: Recipe, precision: str, dtype: torch.dtype) -> None:
    recipe = changed(small_recipe, "train", precision=precision)
    assert models.dtype_of(recipe) == dtype
    assert {weight.dtype for weight in models.bare(recipe, torch.device("cpu")).parameters()} == {dtype}


def test_loss_of_a_peer_is_the_mean_over_tokens() -> None:
    logits_btv = torch.tensor([[[2.0, 1.0, 0.5], [0.0, 3.0, 1.0]]])
    model = nn.Module()
    model.forward = lambda tokens_bt: logits_btv  # type: ignore[method-assign]
    loss = models.WithLoss(model)(torch.zeros(1, 2), torch.tensor([[0, 2]]))
    first, second = logits_btv[0].softmax(-1).unbind()
    assert loss.item() == pytest.approx(-(first[0].log() + second[2].log()).item() / 2)


@pytest.mark.parametrize(("compiles", "accumulated"), [(False, 1.0), (True, 0.25)])
def test_bare_model_balances_experts_and_compiles(
    small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, compiles: bool, accumulated: float
) -> None:
    """The balance loss is divided by the micro-batches of a step."""
    attached: list[float] = []
    compiled: list[nn.Module] = []
    monkeypatch.setattr(models.balance, "attach", lambda model, section, scale: attached.append(scale))
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    recipe = changed(small_recipe, "model", moe=MoESection(experts=2))
    recipe = changed(changed(recipe, "parallel", workers=1), "train", compile=compiles, batch=int(2 / accumulated), micro_batch=2)
    module = models.bare(recipe, torch.device("cpu"))
    assert attached == [accumulated] and compiled == ([module] if compiles else [])


@pytest.mark.parametrize("compiled", [False, True])
def test_liger_replaces_its_kernels_and_compiles_layers(
    small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """The fused loss replaces the plain one. Layers are compiled one by one."""
    options: list[dict[str, bool]] = []
    library = SimpleNamespace(apply_liger_kernel_to_llama=lambda **chosen: options.append(chosen))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=library))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", library)
    compiles: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiles.append(self))
    llama = nn.Module()
    llama.model = nn.Module()
    llama.model.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    monkeypatch.setattr(models, "hugging_face", lambda _: llama)
    module = models.liger(small_recipe, torch.device("cpu"), compiled)
    assert isinstance(module, models.WithFusedLoss) and module.model is llama
    fused = {"rope": True, "swiglu": True, "rms_norm": True, "cross_entropy": False, "fused_linear_cross_entropy": True}
    assert options == [fused]
    assert compiles == (list(llama.model.layers) if compiled else [])


def test_fused_loss_is_computed_from_shifted_labels_without_a_cache() -> None:
    calls: list[dict[str, Any]] = []
    model = nn.Module()
    model.forward = lambda **call: calls.append(call) or SimpleNamespace(loss=torch.tensor(2.5))  # type: ignore[method-assign]
    tokens = torch.arange(10).view(2, 5)
    assert models.WithFusedLoss(model)(tokens[:, :-1], tokens[:, 1:]).item() == 2.5
    [call] = calls
    assert call["use_cache"] is False and call["labels"].is_contiguous()
    assert call["shift_labels"].tolist() == tokens[:, 1:].tolist() and call["input_ids"].tolist() == tokens[:, :-1].tolist()


def stalled(job: Job, mode_seconds: dict[str, list[float]]) -> list[Record]:
    seconds = mode_seconds[job.recipe.train.checkpoint_upload]
    return [record(5 * number, 0.0, checkpoint_stall_s=stall) for number, stall in enumerate(seconds, 1)] + [record(99, 0.0)]


def test_stalls_are_medians_without_the_first_save(
    small_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three saves a run after the first, each 5 steps apart, and a last one at the end: 25 steps."""
    jobs: list[Job] = []

    def run(job: Job, with_ray: bool, *_: object) -> list[Record]:
        assert with_ray and job.contender == "ours"
        jobs.append(job)
        return stalled(job, {"sync": [9.0, 0.4, 0.5, 0.2], "async": [9.0, 0.02, 0.01, 0.07]})

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(stalls, "open_corpus", lambda _: None)
    monkeypatch.setattr(stalls.shards, "prepare", lambda *_: tmp_path / "tokens")
    medians = stalls.bench(small_recipe, saves=3, rounds=2, path=tmp_path / "stalls.json")
    assert medians == pytest.approx({"sync": 0.4, "async": 0.02})
    assert [job.recipe.train.checkpoint_upload for job in jobs] == ["sync", "async"] * 2
    assert {(job.recipe.train.steps, job.recipe.train.checkpoint_every) for job in jobs} == {(25, 5)}
    found: dict[str, Any] = json.loads((tmp_path / "stalls.json").read_text())
    assert found["ratio"] == pytest.approx(0.05) and found["median_seconds"] == medians
    assert found["stall_seconds"] == {"sync": [0.4, 0.5, 0.2] * 2, "async": [0.02, 0.01, 0.07] * 2}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "round 1 of 2: sync 400.0 ms" and lines[3] == "round 2 of 2: async 20.0 ms"
    assert [line.split() for line in lines[5:7]] == [["sync", "400.0", "ms", "1.000"], ["async", "20.0", "ms", "0.050"]]


def test_failed_run_of_the_checkpoint_benchmark_is_reported(
    small_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> list[Record]:
        raise launch.Failed("out of memory")

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(UserError, match="The measured training run failed: out of memory"):
        stalls._measured(small_recipe, "sync", 3, tmp_path)
