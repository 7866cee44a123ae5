"""Failure model: formulas against a simulation with random failures, and against published fleets."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from strata.planner.catalogue.fleets import FLEETS, Rates
from strata.planner.reliability.failures import (
    MODES,
    USUAL,
    FailurePlan,
    Mode,
    Recovery,
    Saving,
    Spot,
    daly,
    draw,
    exact,
    goodput_curve,
    plan_failures,
)
from strata.planner.serving.queueing import erlang_b, erlang_c, poisson_at_most
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError

HOUR = 3600.0


def mtbf(gpus: int, rates: Rates = FLEETS["llama3"]) -> float:
    """Mean seconds between failures of a run that needs all of its GPUs."""
    return HOUR / (gpus * rates.total)


def young(save_s: float, mtbf_s: float) -> float:
    """Young's interval (1974), accurate where saves are short relative to the time between failures."""
    return math.sqrt(2 * save_s * mtbf_s)


def plan(gpus: int = 4096, **given: object) -> FailurePlan:
    """Plan for the state of a 405B model, on storage slow enough for saves to matter."""
    return plan_failures(gpus, 405e9 * 14, 10.0, 2e10, worksheet=Worksheet("test"), dollars_per_gpu_hour=2.0, **given)  # type: ignore[arg-type]


def simulated(saving: Saving, intervals: int, seed: int) -> float:
    """Useful over wall time of a run simulated interval by interval, with random failures."""
    part = saving.worksheet
    storage = part.parts[0] if part.parts else None
    rng = random.Random(seed)
    clock = work = copied = stored = 0.0  # `copied`, `stored`: work recoverable from the neighbour, or from storage
    written: list[tuple[float, float]] = []  # saves to storage: the time from which they are durable, and the work in them
    store_at = storage["interval_s"] if storage else math.inf
    failure = rng.expovariate(1 / part["mtbf_s"])
    for _ in range(intervals):
        end = clock + saving.interval_s + part["stall_s"]
        if failure > end + part["lag_s"]:
            clock, work = end, work + saving.interval_s
            copied = work
            if storage and clock >= store_at:
                clock += storage["stall_s"]
                written.append((clock + storage["lag_s"], work))
                store_at = clock + storage["interval_s"]
            continue
        stored = max([stored, *(saved for there, saved in written if there <= failure)])
        written.clear()
        both = storage is not None and rng.random() < part["together"]
        work = copied = stored if both else copied
        back = storage["back_s"] if storage and both else part["back_s"]
        clock = failure
        while (again := rng.expovariate(1 / part["mtbf_s"])) < back:  # another failure during the restart
            clock += again
        clock += back
        failure = clock + rng.expovariate(1 / part["mtbf_s"])
    return work / clock


@pytest.mark.parametrize("mode", MODES)
def test_formula_equals_a_run_with_random_failures(mode: Mode) -> None:
    """Slow storage (283 s per save), and a fifth of all failures lose both copies, so that every term matters."""
    saving = plan(recovery=Recovery(together=0.2)).savings[mode]
    assert 0.75 < saving.goodput < 0.98
    assert saving.goodput == pytest.approx(simulated(saving, 400_000, seed=7), rel=0.005)


def test_exact_interval_is_the_best() -> None:
    """Compared with a grid search, for short saves and for saves as long as the time between failures."""
    for save in (1.0, 60.0, 3600.0):
        every = 3600.0

        def useful(interval: float, save: float = save, every: float = every) -> float:
            return interval / math.expm1((interval + save) / every)

        best = exact(save, every)
        assert useful(best) >= max(useful(best * (1 + step / 1000)) for step in range(-500, 500))


def test_estimates_agree_for_short_saves() -> None:
    assert young(1.0, 1e6) == pytest.approx(exact(1.0, 1e6), rel=1e-3)
    assert daly(60.0, 1e4) == pytest.approx(exact(60.0, 1e4), rel=1e-4)
    assert abs(daly(600.0, 3600.0) - exact(600.0, 3600.0)) < abs(young(600.0, 3600.0) - exact(600.0, 3600.0)) / 10


def test_llama3_run() -> None:
    """arXiv 2407.21783: 419 interruptions in 54 days, more than 90% of the time effective, although every save stalled training.
    Storage 2 TB/s sustained; 405B parameters with fp32 weights and Adam. Restarts are MegaScale's upper bound."""
    llama = plan_failures(16384, 405e9 * 14, 16.0, 2e12, worksheet=Worksheet("test"))
    assert mtbf(16384) == pytest.approx(54 * 24 * HOUR / 419)
    assert llama.mtbf_s / HOUR == pytest.approx(3.1, abs=0.05)
    assert 0.90 < llama.savings["blocking"].goodput * llama.available < 0.95


def test_rsc_fleets() -> None:
    """arXiv 2410.21680: jobs of 1,024 GPUs ran 7.9 h between failures. 1.8 h for 16,384 and 0.23 h for 131,072 are its
    projections from 6.5 failures in 1,000 node-days, which is a lower rate."""
    assert mtbf(1024, FLEETS["rsc-1-jobs"]) / HOUR == pytest.approx(7.9)
    assert mtbf(16384, FLEETS["rsc-1"]) / HOUR == pytest.approx(1.8, abs=0.01)
    assert mtbf(131072, FLEETS["rsc-1"]) / HOUR == pytest.approx(0.23, abs=0.01)
    assert FLEETS["rsc-2"].total < FLEETS["llama3"].total < FLEETS["rsc-1"].total


def test_more_gpus_never_raise_goodput() -> None:
    recovery = Recovery(spares=16)
    plans = [plan(gpus, recovery=recovery) for gpus in (8, 64, 512, 1024, 4096, 16384, 65536, 131072)]
    for fewer, more in pairwise(plans):
        assert more.goodput < fewer.goodput
        assert all(more.savings[mode].goodput < fewer.savings[mode].goodput for mode in MODES)


def test_more_spares_never_lower_goodput() -> None:
    plans = [plan(recovery=Recovery(spares=spares)) for spares in range(12)]
    assert all(more.goodput > fewer.goodput for fewer, more in pairwise(plans))
    waiting = plans[0].mtbf_s / FLEETS["llama3"].hardware * FLEETS["llama3"].total
    assert plans[0].available == pytest.approx(waiting / (waiting + USUAL.repair_s))  # without spares, runs and repairs alternate


def test_spares_meet_the_confidence() -> None:
    found = plan(16384, recovery=Recovery(confidence=0.999))
    out = found.worksheet["nodes_in_repair"]
    assert poisson_at_most(found.spares - 1, out) >= 0.999 > poisson_at_most(found.spares - 2, out)


def test_checkpoint_modes_are_ordered_by_goodput() -> None:
    savings = plan(16384).savings
    assert savings["blocking"].goodput < savings["asynchronous"].goodput < savings["peer-memory"].goodput
    assert all(saving.interval_s == pytest.approx(saving.interval_steps * 10.0) for saving in savings.values())


def test_asynchronous_saves_do_not_overlap() -> None:
    slow = plan_failures(16384, 405e9 * 14, 10.0, 1e9, worksheet=Worksheet("test"))
    assert slow.savings["asynchronous"].interval_s + slow.worksheet["stall_share"] * slow.save_s >= slow.save_s


def test_spot_is_cheaper_while_saves_fit_the_notice() -> None:
    calm = Spot(preemptions_per_hour=1e-3, price_ratio=0.35, notice_s=400.0)
    assert plan(256).save_s < calm.notice_s
    saved = plan(256, spot=calm)
    lost = plan(256, spot=replace(calm, notice_s=30.0))
    assert saved.spot_dollars_per_useful_hour and lost.spot_dollars_per_useful_hour
    assert saved.spot_dollars_per_useful_hour < lost.spot_dollars_per_useful_hour
    assert saved.spot_dollars_per_useful_hour < saved.dollars_per_useful_hour
    stormy = plan(4096, spot=replace(calm, preemptions_per_hour=0.02))
    assert stormy.spot_dollars_per_useful_hour and stormy.spot_dollars_per_useful_hour > stormy.dollars_per_useful_hour


def test_spot_formula_equals_a_run_with_random_preemptions() -> None:
    """With a save at notice, a preemption costs its wait and no work. Failures in between are in `best_goodput`."""
    found = plan(1024, spot=Spot(preemptions_per_hour=2e-3, price_ratio=0.35, notice_s=400.0))
    part = next(part for part in found.worksheet.parts if part.title == "spot")
    rng, running, wall = random.Random(5), 0.0, 0.0
    for _ in range(50_000):
        span = rng.expovariate(part["preemptions_per_s"] + part["hardware_share"] / part["mtbf_s"])
        preempted = rng.random() < part["preemptions_per_s"] / (
            part["preemptions_per_s"] + part["hardware_share"] / part["mtbf_s"]
        )
        running, wall = running + span, wall + span + (part["preemption_s"] if preempted else part["wait_s"])
    assert part["spot_goodput"] == pytest.approx(part["best_goodput"] * running / wall, rel=0.02)


@pytest.mark.slow
def test_goodput_curve_peaks_at_the_planned_interval(tmp_path: Path) -> None:
    found = plan()
    for mode, saving in found.savings.items():
        below, at, above = goodput_curve(found, [saving.interval_s / 3, saving.interval_s, saving.interval_s * 3])[mode]
        assert at == pytest.approx(saving.goodput)
        assert above < at and (below < at or saving.interval_steps == 1)
    draw(found, tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").stat().st_size > 10_000


def test_a_run_without_progress_is_refused() -> None:
    with pytest.raises(UserError, match="makes no progress"):
        plan_failures(10**6, 1e15, 10.0, 1e9, worksheet=Worksheet("test"))
    with pytest.raises(UserError, match="--gpus 0 is out of range"):
        plan_failures(0, 1e12, 10.0, 1e9, worksheet=Worksheet("test"))


def test_erlang_formulas() -> None:
    """Compared with tabulated values."""
    assert erlang_b(10, 5.0) == pytest.approx(0.018385, abs=1e-6)
    assert erlang_c(10, 8.0) == pytest.approx(0.409180, abs=1e-6)
    assert erlang_c(1, 0.3) == pytest.approx(0.3)
