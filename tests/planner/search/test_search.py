"""The layout search returns the optimum, returns only layouts that work, and is fast."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from support import within

from strata.planner import recipes
from strata.planner.catalogue import library
from strata.planner.catalogue.shape import Experts, Shape
from strata.planner.catalogue.software import program
from strata.planner.checks import check
from strata.planner.layout import Layout, Recompute, Schedule
from strata.planner.memory.activations import keeping_of
from strata.planner.memory.plan import peak_bytes
from strata.planner.search.memory_bounds import MemoryBounds
from strata.planner.search.pareto import front
from strata.planner.search.search import SearchResult, search
from strata.planner.search.space import ANYTHING, SLACK, STRATA, Batch, Family, Limits, divide_batch, layout_of, pipelines, slices
from strata.planner.search.time_bounds import TimeBounds
from strata.planner.step.step import plan_step
from strata.planner.worksheet import Worksheet
from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.hardware.specs import Fabric, Gpu
from strata.platform.layout_rules import recipe_problem
from strata.platform.recipe import ModelSection, ParallelSection, Recipe, TrainSection
from strata.training.layout import require_workable

H100, NDR, MEGATRON = hardware.gpu("h100"), hardware.fabric("ndr-400"), program("megatron-core")
MIXTURE = Shape("a mixture", 8, 1024, 16, 8, 64, 2816, 32000, 4096, experts=Experts(count=8, top_k=2, ffn=1408, dense_layers=1))


def find(shape: Shape, gpus: int | tuple[int, ...], batch_tokens: float, fabric: Fabric = NDR, **more: object) -> SearchResult:
    return search(shape, H100, fabric, gpus, MEGATRON, batch_tokens=batch_tokens, sequence=4096, **more)  # type: ignore[arg-type]


# Lower bounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "sequences"), [("llama-3-8b", 64, 96), ("qwen3-30b-a3b", 96, 512), ("mixtral-8x7b", 1000, 300)]
)
def test_no_layout_is_below_its_lower_bounds(name: str, gpus: int, sequences: int) -> None:
    shape, chance = library.model(name), random.Random(name)
    times, memory = TimeBounds(shape, H100, NDR, MEGATRON, 4096, "bf16"), MemoryBounds(shape, MEGATRON, 4096, "bf16")
    cuts = list(slices(shape, 4096, H100.domain, gpus, sequences, ANYTHING))
    chosen = [each for each in pipelines(shape.layers, ANYTHING) if each.stages <= 16]
    seen = 0
    while seen < 150:
        cut, pipeline, recompute, zero = (chance.choice(each) for each in (cuts, chosen, ANYTHING.recomputes, ANYTHING.zeros))
        shared = divide_batch(Batch(sequences, SLACK), cut, pipeline, gpus)
        if shared is None:
            continue
        seen += 1
        family = Family(cut, pipeline, recompute, *shared)
        layout = layout_of(family, "bf16", zero)
        check(shape, layout, 4096, H100)
        step = plan_step(shape, layout, H100, NDR, MEGATRON, Worksheet(""), 4096, times.layers)
        assert times.least_step(family, zero) <= step.seconds * (1 + 1e-9), layout
        assert times.least_pipeline(family) <= step.seconds * (1 + 1e-9), layout
        for overlapping in {pipeline.schedule.startswith("dualpipe"), True}:
            work, round_trip = times.least_work(cut, recompute, overlapping)
            assert work * layout.micro_batches / layout.pipeline <= step.seconds * (1 + 1e-9), layout
            assert round_trip <= step.seconds * (1 + 1e-9), layout
        assert memory.least(family, zero, "none") <= memory.peak(layout), layout
        assert memory.least_state(zero, "none", layout.gpus) <= memory.peak(layout), layout


def every_layout(shape: Shape, gpus: int, batch: int) -> Iterator[Layout]:
    """A superset of the search space, by plain loops: Ulysses and ring together, and several split sequences per micro-batch."""
    sizes = [1, 2, 4, 8]
    chunks: dict[Schedule, int] = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipe": 1, "dualpipev": 2}
    recomputes: tuple[Recompute, ...] = ("none", "full")
    for tensor, pipeline, ulysses, ring, micro_batch in product(sizes, sizes, [1, 2], [1, 2], [1, 2, 4]):
        data = gpus // (tensor * pipeline * ulysses * ring)
        cut = Layout(data, tensor, pipeline, ulysses, ring, micro_batch=micro_batch, batch=batch)
        schedules = list(chunks) if pipeline > 1 else list(chunks)[:1]
        experts = sizes if shape.experts else [1]
        for expert, schedule, zero, recompute in product(experts, schedules, range(4), recomputes):
            layout = replace(cut, expert=expert, schedule=schedule, interleave=chunks[schedule], zero=zero, recompute=recompute)
            if data >= 1:
                yield from (layout, replace(layout, sequence_parallel=True))


SLOW = Fabric("one card of 25 Gb/s", nic=3.1e9, nics=1, kind="roce", topology="fat-tree")
PAIRS = replace(H100, name="pairs of H100", domain=2)
DENSE = replace(library.model("llama-3.2-1b"), layers=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "gigabytes", "gpu", "fabric"),
    [(DENSE, 17.0, H100, NDR), (DENSE, 12.0, PAIRS, SLOW), (MIXTURE, 7.0, H100, NDR)],
)
def test_search_finds_the_optimum_of_exhaustive_enumeration(shape: Shape, gigabytes: float, gpu: Gpu, fabric: Fabric) -> None:
    batch, keeping, times = 32, keeping_of(MEGATRON), TimeBounds(shape, gpu, fabric, MEGATRON, 4096, "bf16")
    best, tried = float("inf"), 0
    for layout in every_layout(shape, 8, batch):
        try:
            check(shape, layout, 4096, gpu)
        except UserError:
            continue
        tried += 1
        if peak_bytes(shape, layout, keeping, 4096) <= gigabytes * 1e9:
            step = plan_step(shape, layout, gpu, fabric, MEGATRON, Worksheet(""), 4096, times.layers)
            best = min(best, step.seconds)
    found = search(shape, gpu, fabric, 8, MEGATRON, batch=batch, sequence=4096, memory=gigabytes * 1e9)
    assert tried > 500
    assert found.best[0].step.seconds == pytest.approx(best, rel=1e-9)


# Results


@pytest.mark.parametrize("gpus", [1, 8, 24, 100])
def test_every_result_is_valid_and_fits(gpus: int) -> None:
    found = find(library.model("llama-3.2-3b"), gpus, 4e6)
    for one in (*found.best, *found.by_gpus, *found.pareto):
        check(library.model("llama-3.2-3b"), one.layout, 4096, H100)
        assert one.peak == peak_bytes(library.model("llama-3.2-3b"), one.layout, keeping_of(MEGATRON), 4096) <= H100.memory
        assert one.layout.gpus + one.idle == one.gpus <= gpus
        assert one.layout.batch * 4096 == pytest.approx(4e6, rel=SLACK + 1e-3)
    seconds = [one.step.seconds / one.layout.batch for one in found.best]
    assert seconds == sorted(seconds) and len(set(map(str, found.best))) == len(found.best) > 1


def test_a_batch_in_sequences_is_exact_and_a_batch_in_tokens_allows_odd_gpu_counts() -> None:
    exact = search(library.model("llama-3-8b"), H100, NDR, (100,), MEGATRON, batch=512, sequence=4096).best[0]
    near = find(library.model("llama-3-8b"), (100,), 512 * 4096).best[0]
    assert exact.layout.batch == 512 and exact.layout.gpus <= 64 + 32  # only powers of two divide it
    assert near.layout.gpus >= 96 and near.step.tokens_per_s > exact.step.tokens_per_s


@pytest.mark.slow
def test_more_memory_never_lowers_the_best_throughput() -> None:
    rates = [
        find(library.model("llama-3-8b"), (16,), 1e6, memory=gigabytes * 1e9).best[0].step.tokens_per_s
        for gigabytes in (20, 24, 32, 48, 80, 160)
    ]
    assert rates == sorted(rates) and rates[0] < rates[-1]


@pytest.mark.slow
def test_more_oversubscription_never_shortens_the_best_step() -> None:
    base = hardware.fabric("roce-400")
    seconds = []
    for times in (1.0, 2.0, 4.0, 16.0):
        best = find(library.model("mixtral-8x7b"), (128,), 4e6, fabric=replace(base, oversubscription=times)).best[0]
        seconds.append(best.step.seconds / best.layout.batch)
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"gpus": (0, 8)}, {"batch": 0}, {"batch_tokens": 1e6}, {"deadline_days": 3.0}])
def test_invalid_arguments_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        search(**{"shape": DENSE, "gpu": H100, "fabric": NDR, "gpus": 8, "software": MEGATRON, "batch": 8} | wrong)  # type: ignore[arg-type]


def test_goals() -> None:
    shape = library.model("llama-3-8b")
    fast, cheap, few = (find(shape, 256, 4e6, goal=goal, budget_tokens=1e12) for goal in ("time", "cost", "gpus"))
    assert fast.best[0].gpus == 256
    assert cheap.best[0].cost == min(one.cost for one in (*fast.by_gpus, *cheap.by_gpus)) < fast.best[0].cost
    assert few.best[0].gpus < cheap.best[0].gpus < 256
    with pytest.raises(UserError, match="does not fit"):
        find(shape, few.best[0].gpus - 1, 4e6)
    assert few.best[0].days is not None and few.best[0].dollars is not None
    assert few.best[0].dollars == pytest.approx(few.best[0].gpus * few.best[0].days * 24 * H100.dollars_per_hour)


def test_the_fewest_gpus_that_meet_a_deadline() -> None:
    shape = library.model("llama-3-8b")
    best = find(shape, 512, 4e6, goal="gpus", budget_tokens=1e12, deadline_days=20).best[0]
    assert best.days is not None and best.days <= 20
    fewer = find(shape, (best.gpus - H100.domain,), 4e6, budget_tokens=1e12).best[0]
    assert fewer.days is not None and fewer.days > 20
    with pytest.raises(UserError, match="days, not --deadline 1"):
        find(shape, 512, 4e6, goal="gpus", budget_tokens=1e12, deadline_days=1)


def test_the_pareto_front_runs_from_the_fastest_to_the_cheapest() -> None:
    found = find(library.model("llama-3-8b"), 256, 4e6, budget_tokens=1e12)
    assert found.pareto[0].gpus == max(found.by_gpus, key=lambda one: one.step.tokens_per_s).gpus
    assert found.pareto[-1].cost == min(one.cost for one in found.by_gpus)
    costs = [one.cost for one in found.pareto]
    assert costs == sorted(costs, reverse=True) and len(costs) > 1
    points = [(1, 9), (2, 9), (3, 4), (2, 7), (5, 4), (4, 3)]
    assert front(points, lambda point: point) == [(1, 9), (2, 7), (3, 4), (4, 3)]


def test_an_infeasible_search_names_the_missing_memory_and_the_remedies() -> None:
    with pytest.raises(UserError) as error:
        find(library.model("llama-3-70b"), 8, 1e6)
    assert "does not fit on 8 h100-sxm" in error.value.cause and "too much" in error.value.cause
    assert "on 16 GPUs" in error.value.fix and "offload" in error.value.fix
    fits = search(library.model("llama-3-70b"), H100, NDR, 16, MEGATRON, batch_tokens=1e6, sequence=4096)
    assert fits.best[0].peak <= H100.memory
    with pytest.raises(UserError, match="offload all"):  # the offload that strata train allows on one GPU
        search(library.model("llama-3-8b"), H100, NDR, 1, program("strata"), batch=8, sequence=2048, memory=18e9, limits=STRATA)
    offloaded = find(library.model("llama-3-70b"), 8, 1e6, limits=Limits(offloads=("none", "optimizer")))
    assert offloaded.best[0].layout.offload == "optimizer"


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["time", "cost", "gpus"])
@pytest.mark.parametrize(("name", "gpus", "tokens", "seconds"), [("1t-moe", 100_000, 64e6, 5.0), ("llama-3-70b", 512, 4e6, 2.0)])
def test_search_is_fast(name: str, gpus: int, tokens: float, seconds: float, goal: str) -> None:
    with within(seconds):
        found = search(library.model(name), H100, NDR, gpus, MEGATRON, batch_tokens=tokens, goal=goal)  # type: ignore[arg-type]
    assert found.best[0].layout.gpus > 0.97 * found.best[0].gpus


# Plans as recipes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "gpus"),
    [(library.model("llama-3-8b"), 16), (library.model("llama-3-70b"), 256), (library.model("mixtral-8x7b"), 64)],
)
def test_strata_trains_what_the_search_finds_for_it(shape: Shape, gpus: int, tmp_path: Path) -> None:
    found = search(shape, H100, NDR, gpus, program("strata"), batch_tokens=2e6, sequence=4096, limits=STRATA, top=20)
    for one in (*found.best, *found.by_gpus):
        recipe = recipes.as_recipe(shape, one.layout, 4096, tokens=1e10)
        (tmp_path / "recipe.yaml").write_text(recipe_file.dump(recipe))
        loaded = recipe_file.load(str(tmp_path / "recipe.yaml"))
        require_workable(loaded.model, loaded.train, loaded.parallel)
        again, layout, sequence = recipes.from_recipe(loaded)
        assert (replace(again, name=shape.name, context=shape.context, ffn=shape.ffn), layout, sequence) == (
            shape,
            one.layout,
            4096,
        )
        assert recipes.warning(loaded, H100) is None


def test_layout_rules_survive_conversion_to_a_recipe() -> None:
    """On layouts of eight workers: the planner's and the recipe's layout violate the same rule, or neither does."""
    dense = ModelSection(layers=4, hidden=256, heads=8, kv_heads=4, ffn=1024, vocab=512, context=64)
    sparse = dense.model_copy(update={"moe": recipe_file.load("laptop-moe").model.moe})
    refused = allowed = 0
    for tensor, pipeline, sequence, expert, zero, schedule in product(
        (1, 2), (1, 2), (1, 2), (1, 2), (0, 3), ("1f1b", "dualpipev")
    ):
        cut = {"tensor": tensor, "pipeline": pipeline, "sequence": sequence, "expert": expert, "zero": zero, "schedule": schedule}
        if 8 // (tensor * pipeline * sequence) % expert:
            continue
        parallel = ParallelSection.model_validate({"workers": 8, **cut})
        for model, precision in product((dense, sparse), ("bf16", "fp32")):
            train = TrainSection.model_validate({"steps": 1, "batch": 8, "micro_batch": 1, "lr": 1e-3, "precision": precision})
            shape, layout, length = recipes.from_recipe(Recipe(model=model, train=train, parallel=parallel))
            problem = recipe_problem(model, train, parallel)
            assert recipes.layout_problem(shape, layout, length) == problem
            refused, allowed = refused + (problem is not None), allowed + (problem is None)
    assert refused > 100 and allowed > 10


def test_plans_that_training_does_not_support_are_refused() -> None:
    llama = library.model("llama-3-8b")
    for shape in (library.model("deepseek-v3"), library.model("gpt-3-6.7b"), library.model("qwen3-0.6b")):
        with pytest.raises(UserError, match="strata train cannot run this plan"):
            recipes.as_recipe(shape, Layout(), 2048)
        with pytest.raises(UserError):
            search(shape, H100, NDR, 64, program("strata"), batch=64, sequence=2048, limits=STRATA)
    for change in (
        {"context": 2},
        {"schedule": "interleaved", "interleave": 2},
        {"precision": "fp8"},
        {"sequence_parallel": True},
    ):
        with pytest.raises(UserError):
            recipes.as_recipe(llama, replace(Layout(tensor=2, pipeline=2, batch=8), **change), 2048)  # type: ignore[arg-type]


def test_a_recipe_that_does_not_fit_causes_a_warning_on_gpus_only() -> None:
    small, large = recipe_file.load("8xh100"), recipe_file.load("8xh100", ["model.layers=320"])
    assert recipes.warning(small, H100) is None
    text = recipes.warning(large, H100)
    assert text and "too little" in text and "h100-sxm" in text and "\n" not in text
    assert recipes.warning(recipe_file.load("8xh100", ["model.layers=320", "parallel.device=cpu"]), H100) is None
