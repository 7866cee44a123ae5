"""Best-first search on a small space against enumeration of all its layouts, and the choices around it."""

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import program
from strata.planner.layout import Layout
from strata.planner.memory.activations import keeping_of
from strata.planner.memory.plan import peak_bytes
from strata.planner.search import best_first, no_fit
from strata.planner.search import search as searching
from strata.planner.search.best_first import BestFirst, Candidate
from strata.planner.search.memory_bounds import MemoryBounds
from strata.planner.search.space import Batch, Family, Limits, divide_batch, layout_of, pipelines, slices
from strata.planner.search.time_bounds import TimeBounds
from strata.planner.step.step import plan_step
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware

H100, NDR, CORE = hardware.gpu("h100"), hardware.fabric("ndr-400"), program("megatron-core")
SHAPE = Shape("small", 4, 1024, 16, 8, 64, 2816, 32000, 4096)
LIMITS = Limits(
    schedules=("1f1b", "dualpipev"), recomputes=("none", "full"), zeros=(0, 1, 3), sequence_parallel=(False,), rings=False
)
BATCH = Batch(8)
MEMORY = 5e9


def begin(memory: float = MEMORY, limits: Limits = LIMITS, budget: float | None = 1e9, most: int = 8) -> BestFirst:
    return BestFirst(
        TimeBounds(SHAPE, H100, NDR, CORE, 4096, "bf16"),
        MemoryBounds(SHAPE, CORE, 4096, "bf16"),
        BATCH,
        most,
        limits,
        memory,
        budget,
    )


def every_layout(gpus: int, limits: Limits = LIMITS, offload: Any = "none") -> list[Layout]:
    found = []
    for slice, pipeline, recompute in product(
        slices(SHAPE, 4096, H100.domain, gpus, BATCH.sequences, limits), pipelines(SHAPE.layers, limits), limits.recomputes
    ):
        shared = divide_batch(BATCH, slice, pipeline, gpus)
        if shared:
            alone = shared[0] * slice.sequence == 1
            for zero in limits.zeros[:1] if alone else limits.zeros:
                found.append(layout_of(Family(slice, pipeline, recompute, *shared), "bf16", zero, offload))
    return found


def peak(layout: Layout) -> float:
    return peak_bytes(SHAPE, layout, keeping_of(CORE), 4096)


@cache
def seconds(layout: Layout) -> float:
    return plan_step(SHAPE, layout, H100, NDR, CORE, Worksheet(""), 4096).seconds / layout.batch


@pytest.mark.parametrize("gpus", [2, 4])
def test_all_layouts_that_fit_are_found_in_order(gpus: int) -> None:
    search = begin()
    found = list(search.in_order(gpus))
    expected = sorted((layout for layout in every_layout(gpus) if peak(layout) <= MEMORY), key=seconds)
    assert [seconds(one.layout) for one in found] == pytest.approx([seconds(layout) for layout in expected])
    assert {one.layout for one in found} == set(expected)
    assert 0 < len(expected) == search.fitting <= search.considered <= len(every_layout(gpus))
    assert len(expected) < len(every_layout(gpus))  # some do not fit
    assert all(one.peak == peak(one.layout) and one.gpus == gpus for one in found)


def test_a_limit_on_time_cuts_the_list() -> None:
    whole = list(begin().in_order(2))
    middle = whole[len(whole) // 2]
    enough = middle.step.seconds / middle.layout.batch
    some = list(begin().in_order(2, enough))
    assert [one.layout for one in some] == [one.layout for one in whole if one.step.seconds / one.layout.batch <= enough]


def test_the_fastest_are_the_first_and_a_search_resumes() -> None:
    search = begin()
    whole = [one.layout for one in begin().in_order(2)]
    assert [one.layout for one in search.fastest(2, 3)] == whole[:3]
    spent = search._work
    assert [one.layout for one in search.fastest(2, 2)] == whole[:2]
    assert search._work == spent
    assert [one.layout for one in search.fastest(2, 5)] == whole[:5]
    assert [one.layout for one in search.fastest(2, 10**6)] == whole


def test_cost_days_and_dollars_of_a_candidate() -> None:
    one = begin().fastest(8, 1)[0]
    dollars_per_s = 8 * H100.dollars_per_hour / 3600
    assert one.cost == pytest.approx(dollars_per_s / one.step.tokens_per_s * 1e6)
    assert one.days == pytest.approx(1e9 / one.step.tokens_per_s / 86400)
    assert one.dollars == pytest.approx(one.days * 86400 * dollars_per_s)
    unpriced = begin(budget=None).fastest(8, 1)[0]
    assert unpriced.days is None and unpriced.dollars is None


def test_idle_gpus_are_those_that_a_layout_leaves() -> None:
    assert Candidate(Layout(data=3, tensor=2), SimpleNamespace(), 0.0, 8, 0.0, None, None).idle == 2  # type: ignore[arg-type]


def test_state_that_cannot_fit_is_not_searched() -> None:
    """With ZeRO-3, 16 bytes for each parameter over eight GPUs."""
    state = 16 * SHAPE.parameters() / 8
    search = begin(memory=state * 0.99)
    assert list(search.in_order(8)) == [] and search.considered == 0
    assert begin(memory=state * 1.01).memory_bounds.least_state(3, "none", 8) <= state


def test_layouts_that_the_limits_refuse_are_left_out() -> None:
    odd = replace(LIMITS, refuses=lambda shape, layout, sequence: "no pipelines" if layout.pipeline > 1 else None)
    found = list(begin(limits=odd, memory=80e9).in_order(8))
    assert {one.layout for one in found} == {layout for layout in every_layout(8) if layout.pipeline == 1}


def test_a_single_rank_has_the_first_zero_stage_that_is_allowed() -> None:
    picky = replace(LIMITS, refuses=lambda shape, layout, sequence: "no" if layout.zero == 0 else None)
    found = list(begin(limits=picky, memory=80e9).in_order(1))
    assert found and {one.layout.zero for one in found} == {1}


def test_offloads_are_all_tried() -> None:
    both = replace(LIMITS, offloads=("none", "optimizer"))
    found = list(begin(limits=both, memory=80e9).in_order(2))
    assert {one.layout for one in found} == {*every_layout(2), *every_layout(2, offload="optimizer")}


def test_recomputation_that_saves_little_is_skipped() -> None:
    """Selective recomputation of flash attention saves its statistics alone."""
    every = replace(LIMITS, recomputes=("none", "selective", "full"))
    found = list(begin(limits=every, memory=80e9).in_order(2))
    assert {one.layout.recompute for one in found} == {"none", "full"}
    first = replace(LIMITS, recomputes=("selective", "full"))  # the first mode is always searched
    assert {one.layout.recompute for one in begin(limits=first, memory=80e9).in_order(2)} == {"selective", "full"}


def test_work_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit for each memory computation, 100 for each simulation."""
    search = begin()
    list(search.in_order(2))
    assert search._work == search.considered + 100 * search.fitting
    monkeypatch.setattr(best_first, "MOST_WORK", search._work)
    list(begin().in_order(2))
    monkeypatch.setattr(best_first, "MOST_WORK", search._work - 1)
    with pytest.raises(UserError, match="before the fastest was certain"):
        list(begin().in_order(2))


def test_lower_bound_of_a_group() -> None:
    search = begin()
    group = search._groups[0]
    assert search._least(group, 8) == max(group.work / 8, group.round_trip / 8)
    loose = begin()
    loose.batch = Batch(8, 0.25)
    assert loose._least(group._replace(work=0.0), 8) == group.round_trip / 10
    assert loose._least(group._replace(round_trip=0.0), 4) == group.work / 4


def test_work_of_a_group_is_per_sequence_over_all_its_gpus() -> None:
    search = begin()
    assert {group.slice.gpus for group in search._groups} == {1, 2, 4, 8}
    assert {group.slice.micro_batch for group in search._groups} == {1, 2, 4, 8}
    for group in search._groups:
        seconds, round_trip = search.time_bounds.least_work(group.slice, group.recompute, group.overlapping)
        assert (group.work, group.round_trip) == (seconds * group.slice.gpus / group.slice.micro_batch, round_trip)


# ---------------------------------------------------------------- nothing fits


def test_the_layout_with_the_least_memory() -> None:
    search = begin()
    found = no_fit.smallest(search, 8, "none")
    candidates = [each for each in every_layout(8) if each.schedule == "1f1b" and each.micro_batch == 1]
    assert found and found[0] == min(peak(layout) for layout in candidates) == peak(found[1])


def test_remedies_are_the_fewest_doublings_and_the_least_offload() -> None:
    sizes = {gpus: no_fit.smallest(begin(), gpus, "none")[0] for gpus in (1, 2, 4, 8)}  # type: ignore[index]
    offloaded = {kind: no_fit.smallest(begin(), 1, kind)[0] for kind in ("optimizer", "all")}  # type: ignore[index, arg-type]
    assert sizes[1] > sizes[2] > sizes[4] > sizes[8] and sizes[1] > offloaded["optimizer"] > offloaded["all"]
    error = no_fit.nothing_fits(begin(memory=sizes[4]), 1)
    assert error.fix.startswith("It would fit on 4 GPUs")
    assert list(no_fit._more_gpus(begin(memory=sizes[4] * 0.999), 1)) == ["on 8 GPUs"]
    assert list(no_fit._offload(begin(memory=offloaded["optimizer"]), 1)) == [
        "with the optimizer's state in the host's memory (offload optimizer)"
    ]
    assert list(no_fit._offload(begin(memory=offloaded["all"]), 1)) == ["with all state in the host's memory (offload all)"]
    assert list(no_fit._offload(begin(memory=offloaded["all"] * 0.99), 1)) == []
    allowed = replace(LIMITS, offloads=("none", "optimizer"))
    assert list(no_fit._offload(begin(memory=offloaded["optimizer"], limits=allowed), 1)) == [
        "with all state in the host's memory (offload all)"
    ]


def test_a_batch_that_no_layout_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_fit, "smallest", lambda *given: None)
    error = no_fit.nothing_fits(begin(), 3)
    assert error.cause == "There is no layout of small on 3 GPUs for a batch of 8 sequences."
    assert error.fix == "Change the batch."


def test_clusters_up_to_eleven_doublings_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def smallest(search: BestFirst, gpus: int, offload: str) -> None:
        tried.append(gpus)

    monkeypatch.setattr(no_fit, "smallest", smallest)
    assert list(no_fit._more_gpus(begin(), 3)) == []
    assert tried == [3 * 2**n for n in range(1, 12)]


def test_errors_name_the_missing_memory_or_the_reason() -> None:
    error = no_fit.nothing_fits(begin(memory=1e9), 1)
    assert error.cause.startswith("small does not fit on 1 h100-sxm of 954 MiB: the layout with the least memory (tensor 1, ")
    assert error.cause.endswith("too much.")
    assert no_fit.nothing_fits(begin(memory=1.0), 1).fix == "Make the model or the sequences smaller."
    refusing = replace(LIMITS, refuses=lambda shape, layout, sequence: "It is small.")
    error = no_fit.nothing_fits(begin(limits=refusing), 1)
    assert error.cause.endswith("for a batch of 8 sequences. It is small.") and error.fix == "Change the model."
    picky = replace(LIMITS, refuses=lambda shape, layout, sequence: "no" if layout.batch == 8 else None)
    error = no_fit.nothing_fits(begin(limits=picky), 1)
    assert error.cause.endswith("for a batch of 8 sequences.") and error.fix == "Change the batch."


# ---------------------------------------------------------------- goals


def candidate(gpus: int, seconds: float, days: float | None = None) -> Candidate:
    return Candidate(Layout(data=gpus, batch=10), SimpleNamespace(seconds=seconds), 0.0, gpus, 0.0, days, None)  # type: ignore[arg-type]


def stand_in(domain: int = 8, budget: float | None = 864e6) -> Any:
    """Sequences of 1,000 tokens: a deadline of one day for 864 million tokens is 0.1 s a sequence."""
    return SimpleNamespace(time_bounds=SimpleNamespace(gpu=SimpleNamespace(domain=domain), sequence=1000), budget_tokens=budget)


def test_time_per_sequence_of_a_deadline() -> None:
    assert searching._enough(stand_in(), 1.0) == pytest.approx(0.1)
    assert searching._enough(stand_in(), 3.0) == pytest.approx(0.3)
    assert searching._enough(stand_in(), None) == float("inf")
    assert searching._enough(stand_in(budget=None), 3.0) == float("inf")


def test_listed_counts_are_not_bisected() -> None:
    listed = [candidate(64, 0.5), candidate(32, 1.0), candidate(16, 1.001)]
    assert searching._fewest(stand_in(), listed, 1.0, exactly=True) == 32


@pytest.mark.parametrize(
    ("needed", "expected"),
    [(400, 400), (401, 408), (389, 392), (393, 400), (257, 264), (512, 512)],  # whole domains of eight
)
def test_bisection_between_halves(needed: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_used", lambda search, gpus, enough: gpus if gpus >= needed else None)
    by_gpus = [candidate(512, 0.5), candidate(256, 2.0)]
    found = searching._fewest(stand_in(), by_gpus, 1.0, exactly=False)
    assert expected <= found <= min(512, expected + 8) and found % 8 == 0  # to one percent


def test_bisection_is_exact_for_small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in range(5, 9):
        monkeypatch.setattr(searching, "_used", lambda search, gpus, enough, n=needed: gpus if gpus >= n else None)
        assert searching._fewest(stand_in(), [candidate(8, 0.5), candidate(4, 2.0)], 1.0, exactly=False) == needed
    # Fewer than a domain are not rounded up, more are: 9 to 16.
    monkeypatch.setattr(searching, "_used", lambda search, gpus, enough: gpus if gpus >= 9 else None)
    assert searching._fewest(stand_in(), [candidate(20, 0.5), candidate(10, 0.9)], 1.0, exactly=False) == 10
    assert searching._fewest(stand_in(), [candidate(16, 0.5)], 1.0, exactly=False) == 16


def test_gpus_that_a_smaller_layout_leaves_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_used", lambda search, gpus, enough: 24 if gpus >= 24 else None)
    assert searching._fewest(stand_in(), [candidate(32, 0.5)], 1.0, exactly=False) == 24


def test_a_deadline_that_is_missed_names_the_best() -> None:
    with pytest.raises(UserError, match=r"864M tokens take at least 2\.5 days, not --deadline 1\."):
        searching._fewest(stand_in(), [candidate(16, 5.0, 2.5), candidate(8, 9.0, 4.5)], 1.0, exactly=False)


def test_gpus_used_by_a_layout_that_is_fast_enough() -> None:
    search = begin()
    fastest = search.fastest(8, 1)[0]
    enough = fastest.step.seconds / fastest.layout.batch
    assert searching._used(begin(), 8, enough) == fastest.layout.gpus
    assert searching._used(begin(), 8, enough * 0.999) is None
    smallest = no_fit.smallest(begin(), 4, "none")
    assert smallest
    assert searching._used(begin(memory=smallest[0]), 4, float("inf")) == smallest[1].gpus
    assert searching._used(begin(memory=smallest[0] - 1), 4, float("inf")) is None


def run(**given: Any) -> searching.SearchResult:
    options = {"gpus": 8, "batch": 8, "limits": LIMITS, "sequence": 4096} | given
    return searching.search(SHAPE, H100, NDR, options.pop("gpus"), CORE, **options)


def test_counts_are_halved_down_to_one_and_sorted() -> None:
    assert [one.gpus for one in run(gpus=12).by_gpus] == [12, 6, 3, 1]
    assert [one.gpus for one in run(gpus=(2, 8, 4, 2)).by_gpus] == [8, 4, 2]
    assert len(run(top=3).best) == 3 and len(run(gpus=1).best) <= 10


def test_batches_in_sequences_or_tokens() -> None:
    assert run(batch=8).best[0].layout.batch == 8
    assert run(batch=None, batch_tokens=8.4 * 4096).best[0].layout.batch == 8
    assert run(sequence=None).best[0].step.tokens_per_s == run().best[0].step.tokens_per_s
    for wrong in ({"batch_tokens": 8 * 4096}, {"batch": None}):
        with pytest.raises(UserError, match="either a batch in sequences or one in tokens"):
            run(**wrong)
    assert run(batch=None, batch_tokens=0.95 * 4096).best[0].layout.batch == 1
    with pytest.raises(UserError, match="less than one sequence"):
        run(batch=None, batch_tokens=0.9499 * 4096)


def test_deadlines_need_a_goal_and_a_budget() -> None:
    with pytest.raises(UserError, match="--deadline 3 is for --goal gpus, not for --goal cost"):
        run(goal="cost", deadline_days=3.0, budget_tokens=1e9)
    with pytest.raises(UserError, match="A deadline needs a token budget"):
        run(goal="gpus", deadline_days=3.0)


def test_positions_bound_the_sequence() -> None:
    learned = replace(SHAPE, positions=True)
    with pytest.raises(UserError, match="4096 positions"):
        searching.search(learned, H100, NDR, 8, CORE, batch=8, sequence=4097)


def test_memory_and_goals() -> None:
    tight, loose = run(memory=3e9), run()
    assert tight.best[0].peak <= 3e9 < loose.best[0].peak
    assert 0 < tight.fitting < tight.considered
    by_rate = sorted(loose.by_gpus, key=lambda one: one.step.tokens_per_s)
    assert run(goal="time").best[0].gpus == by_rate[-1].gpus
    assert run(goal="cost").best[0].gpus == min(loose.by_gpus, key=lambda one: one.cost).gpus
    assert run(goal="gpus").best[0].gpus == 1
    assert 0 < loose.seconds < 600
