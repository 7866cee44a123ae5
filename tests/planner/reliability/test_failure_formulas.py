"""Failure formulas against renewal theory, brute force over intervals and worked numbers."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace

import pytest

from strata.planner.catalogue.fleets import Rates
from strata.planner.reliability.budget import Budget, plan_budget
from strata.planner.reliability.failures import (
    MODES,
    USUAL,
    FailurePlan,
    Recovery,
    Spot,
    daly,
    exact,
    goodput_curve,
    plan_failures,
)
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError

RATES = Rates("some", "a test", {"GPU": 3e-5, "bug": 1e-5}, frozenset({"bug"}))
# 143 nodes of 7; a failure every 3600 / (1000 x 4e-5) = 90,000 s, of which 3 of 4 need a repair.
GPUS, NODES, MTBF = 1000, 143, 90_000.0
STATE, STORAGE, STEP = 6e12, 2e10, 7.0
SAVE = 300.0  # 6e12 / 2e10
COPY = 6e12 / 143 / 1e9
RECOVERY = Recovery(
    detect_s=500.0, start_s=40.0, stall_share=0.1, peer_bandwidth=1e9, together=0.2, repair_s=36_000.0, gpus_per_node=7
)


def plan(recovery: Recovery = RECOVERY, **given: object) -> FailurePlan:
    given = {"worksheet": Worksheet("test"), "rates": RATES, "recovery": recovery, "dollars_per_gpu_hour": 2.5} | given
    return plan_failures(GPUS, STATE, STEP, STORAGE, **given)  # type: ignore[arg-type]


def renewal(interval: float, stall: float, lag: float, back: float, every: float) -> float:
    """Goodput by renewal theory, without a closed form.

    Checkpoint k survives a failure that comes after k intervals with their stalls and the lag. A cycle lasts `every` until the
    failure, and then the restart, which starts again at each failure during it.
    """
    survived = math.fsum(math.exp(-(k * (interval + stall) + lag) / every) for k in range(1, 4000))
    return interval * survived / (every * math.exp(back / every))


def most(useful: Callable[[float], float], low: float, high: float) -> float:
    """Maximum of a function with one peak, by ternary search."""
    for _ in range(200):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (left, high) if useful(left) < useful(right) else (low, right)
    return (low + high) / 2


# Checkpoint modes: stall, lag, restart time and time between failures, by hand.
BY_HAND = {
    "blocking": (300.0, 0.0, 500 + 40 + 300.0, MTBF),
    "asynchronous": (30.0, 300.0, 500 + 40 + 300.0, MTBF),
    "peer-memory": (0.1 * COPY, COPY, 500 + 40 + COPY, MTBF / 0.8),
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_the_goodput_of_renewal_theory_at_the_best_whole_number_of_steps(mode: str) -> None:
    saving = plan().savings[mode]  # type: ignore[index]
    costs = BY_HAND[mode]
    best = max(range(1, 2000), key=lambda steps: steps * STEP / math.expm1((steps * STEP + costs[0]) / costs[3]))
    assert saving.mode == mode
    assert saving.interval_steps == best
    assert saving.interval_s == pytest.approx(best * STEP)
    storage = 1.0
    if mode == "peer-memory":
        every = MTBF / 0.2
        interval = most(lambda x: x / math.expm1((x + 30) / every), 1, every)
        storage = renewal(interval, 30.0, 300.0, 840.0, every)
    assert saving.goodput == pytest.approx(storage * renewal(best * STEP, *costs), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_goodput_curves_follow_renewal_theory(mode: str) -> None:
    found = plan()
    curve = goodput_curve(found, [700.0, 5000.0])[mode]  # type: ignore[index]
    factor = found.savings[mode].worksheet["storage_goodput"] if mode == "peer-memory" else 1.0  # type: ignore[index]
    assert curve == pytest.approx([factor * renewal(interval, *BY_HAND[mode]) for interval in (700.0, 5000.0)], rel=1e-6)


def test_goodput_is_zero_beyond_a_hundred_times_the_time_between_failures() -> None:
    at, beyond = goodput_curve(plan(), [100 * MTBF, 100 * MTBF + 1])["blocking"]
    assert 0 < at < 1e-40 and beyond == 0.0


def test_spares_availability_and_cost_by_hand() -> None:
    """0.75 x 36,000 / 90,000 = 0.3 nodes are in repair on average. Poisson: P(X <= 1) = 0.963 and P(X <= 2) = 0.9964, so a third
    spare is needed for 99%. Erlang's B with 4 servers, by its definition."""
    found = plan()
    terms = [0.3**k / math.factorial(k) for k in range(5)]
    assert found.worksheet["nodes_in_repair"] == pytest.approx(0.3)
    assert (found.mtbf_s, found.save_s, found.spares) == (pytest.approx(MTBF), pytest.approx(SAVE), 3)
    assert found.available == pytest.approx(1 - terms[4] / sum(terms))
    assert found.best.mode == "peer-memory"
    assert found.goodput == pytest.approx(found.best.goodput * found.available)
    assert found.goodput_per_paid_gpu == pytest.approx(found.goodput * 143 / 146)
    assert found.dollars_per_useful_hour == pytest.approx(146 * 7 * 2.5 / found.goodput)
    assert found.spot_dollars_per_useful_hour is None


@pytest.mark.parametrize(("confidence", "spares"), [(0.74, 1), (0.75, 2), (0.96, 2), (0.97, 3), (0.9964, 3), (0.9965, 4)])
def test_spares_are_the_fewest_for_the_confidence(confidence: float, spares: int) -> None:
    """P(X = 0) = 0.7408, P(X <= 1) = 0.9631, P(X <= 2) = 0.99640 for a mean of 0.3."""
    assert plan(replace(RECOVERY, confidence=confidence)).spares == spares


def test_hundreds_of_spares_are_found() -> None:
    """100 nodes are in repair on average, with a standard deviation of 10; 99% is 2.33 deviations above."""
    found = plan(replace(RECOVERY, repair_s=36_000.0 / 0.3 * 100))
    assert found.worksheet["nodes_in_repair"] == pytest.approx(100)
    assert found.spares == pytest.approx(100 + 2.33 * 10, abs=3)


def test_set_spares_replace_the_needed() -> None:
    found = plan(replace(RECOVERY, spares=0))
    assert (found.spares, found.worksheet["spares_needed"]) == (0, 3)
    assert found.available == pytest.approx(1 / 1.3)  # B(1) = 0.3 / 1.3


def test_published_defaults_of_recovery() -> None:
    assert Recovery(600.0, 60.0, 0.05, 50e9, 0.01, 86_400.0, 8, None, 0.99) == USUAL
    assert Spot(0.1, 0.5) == Spot(0.1, 0.5, notice_s=120.0, wait_s=300.0)


def test_failures_of_neighbours_are_never_assumed_impossible() -> None:
    assert plan(replace(RECOVERY, together=0.0)).worksheet["together"] == 1e-6
    assert plan(replace(RECOVERY, together=2e-6)).worksheet["together"] == 2e-6


def test_least_intervals_keep_writes_apart() -> None:
    """A save of 3,000 s stalls for 300 s, so at least 2,700 s = 386 steps lie between saves. Failures alone call for less."""
    slow = plan_failures(8000, 6e13, STEP, 2e10, worksheet=Worksheet("test"), rates=RATES, recovery=RECOVERY)
    asynchronous = slow.savings["asynchronous"]
    assert exact(300.0, 11_250.0) < 2700
    assert asynchronous.interval_steps == 386
    # A node's copy of 6e13 / 1143 / 1e9 = 52.5 s stalls for 5.2 s, so 47.2 s; its best interval is longer.
    copy = 6e13 / 1143 / 1e9
    assert slow.savings["peer-memory"].worksheet["least_interval_s"] == pytest.approx(0.9 * copy)
    assert slow.savings["blocking"].worksheet["least_interval_s"] == STEP


def test_intervals_are_at_least_a_step() -> None:
    long = plan_failures(GPUS, STATE, 50_000.0, STORAGE, worksheet=Worksheet("test"), rates=RATES, recovery=RECOVERY)
    assert [saving.interval_steps for saving in long.savings.values()] == [1, 1, 1]
    storage = long.savings["peer-memory"].worksheet.parts[0]
    assert storage["interval_s"] == 50_000.0  # more than the best for failures of both nodes


def test_young_and_daly_are_listed_beside_the_exact_interval() -> None:
    part = plan().savings["blocking"].worksheet
    assert part["young_s"] == pytest.approx(math.sqrt(2 * 300 * 90_000))
    assert part["young_s"] > part["exact_s"]
    assert part["daly_s"] == pytest.approx(part["exact_s"], rel=1e-4)


def test_dalys_interval_by_hand() -> None:
    """save 2, mtbf 4: ratio 1/4, sqrt(16) x (1 + (1/2)/3 + (1/4)/9) - 2 = 4 x 43/36 - 2. From a save of 2 x mtbf on, mtbf."""
    assert daly(2.0, 4.0) == pytest.approx(4 * 43 / 36 - 2)
    assert daly(2.0, 1.0) == 1.0 and daly(5.0, 1.5) == 1.5
    assert daly(1.999, 1.0) == pytest.approx(0.889, abs=0.001)


@pytest.mark.parametrize("x", [0.01, 0.5, 0.9])
def test_exact_interval_solves_its_equation(x: float) -> None:
    """x = interval / mtbf, where save / mtbf = -x - log(1 - x)."""
    assert exact(-(x + math.log(1 - x)) * 80, 80.0) == pytest.approx(80 * x, rel=1e-9)


def test_exact_interval_of_endless_saves_is_the_time_between_failures() -> None:
    assert exact(1e5, 1.0) == pytest.approx(1.0)


def spot_part(found: FailurePlan) -> Worksheet:
    [part] = [part for part in found.worksheet.parts if part.title == "spot"]
    return part


def test_spot_with_enough_notice_by_hand() -> None:
    """143 nodes, each preempted 0.02 times an hour. A preemption costs a save, the wait, the start and a load: 300 + 250 + 40 +
    300 s. Failed hardware waits for a new node too."""
    spot = Spot(preemptions_per_hour=0.02, price_ratio=0.35, notice_s=300.0, wait_s=250.0)
    found = plan(spot=spot)
    waits = 143 * 0.02 / 3600 * 890 + 0.75 / 90_000 * 250
    goodput = found.best.goodput / (1 + waits)
    assert found.spot_dollars_per_useful_hour == pytest.approx(143 * 7 * 2.5 * 0.35 / goodput)


def test_spot_without_enough_notice_by_hand() -> None:
    spot = Spot(preemptions_per_hour=0.002, price_ratio=0.35, notice_s=299.0, wait_s=250.0)
    found = plan(spot=spot)
    every = 1 / (1 / 90_000 + 143 * 0.002 / 3600)
    interval = most(lambda x: x / math.expm1((x + 30) / every), 1, every)
    goodput = renewal(interval, 30.0, 300.0, 840 + 250.0, every)
    assert found.spot_dollars_per_useful_hour == pytest.approx(143 * 7 * 2.5 * 0.35 / goodput)


def test_spot_saves_do_not_overlap() -> None:
    """Preempted every 3600 / (143 x 0.5) = 50 s, the best interval is shorter than a save of 300 s."""
    spot = Spot(preemptions_per_hour=0.5, price_ratio=0.35, notice_s=1.0, wait_s=250.0)
    assert spot_part(plan(spot=spot))["interval_s"] == pytest.approx(300.0)
    long = plan_failures(GPUS, STATE, 1000.0, STORAGE, worksheet=Worksheet("test"), rates=RATES, recovery=RECOVERY, spot=spot)
    assert spot_part(long)["interval_s"] == pytest.approx(1000.0)


def often(step: float = 10.0, detect: float = 100.0, repair: float = 100.0, spot: Spot | None = None) -> FailurePlan:
    """36 GPUs (5 nodes) that each fail once an hour: 100 s between failures. A save takes 50 s and a start 40."""
    rates, recovery = Rates("often", "a test", {"GPU": 1.0}), Recovery(detect_s=detect, start_s=40.0, repair_s=repair)
    return plan_failures(36, 1e12, step, 2e10, worksheet=Worksheet("test"), rates=rates, recovery=recovery, spot=spot)


def test_runs_without_progress_are_refused_from_fifty_failures_on() -> None:
    """The limit is 50 x 100 s, of a restart and of a step with its save."""
    assert often(detect=5000 - 90).mtbf_s == pytest.approx(100)
    with pytest.raises(UserError, match=r"A restart takes 83.3 min, with a failure every 100 s: the run makes no progress"):
        often(detect=5001 - 90)
    assert 0 < often(step=4950).goodput < 1e-20
    with pytest.raises(UserError, match=r"A step takes 82.5 min and a save 50 s, .* never reaches its next save"):
        often(step=4951)
    preempted = Spot(preemptions_per_hour=10.8, price_ratio=0.4, notice_s=1.0, wait_s=1999 - 190)
    assert often(spot=preempted).spot_dollars_per_useful_hour == 0.0  # 40 s x 50 = 2,000 s; the price of a GPU is 0
    with pytest.raises(UserError, match="makes no progress"):
        often(spot=replace(preempted, wait_s=2001 - 190))


def test_more_nodes_in_repair_than_in_the_run_are_refused() -> None:
    assert often(repair=500.0).worksheet["nodes_in_repair"] == pytest.approx(5)
    with pytest.raises(UserError, match=r"--repair 9 min, 5 nodes would be in repair on average, and the run has 5"):
        often(repair=540.0)


@pytest.mark.parametrize(
    ("given", "option"),
    [((0, 1e12, 10.0, 1e9), "--gpus"), ((8, 0.5, 10.0, 1e9), "--state"), ((8, 1e12, 0.0, 1e9), "--step")],
)
def test_values_out_of_range_name_their_option(given: tuple[int, float, float, float], option: str) -> None:
    with pytest.raises(UserError, match=f"{option} .* is out of range"):
        plan_failures(*given, worksheet=Worksheet("test"))


def test_budget_by_hand() -> None:
    """8.64e12 tokens at 1e6 a second take 100 days, 125 at a goodput of 0.8: 16 x 125 x 24 = 48,000 GPU-hours."""
    found = plan_budget(8.64e12, 1e6, 16, 2.5, 700.0, 0.8, Worksheet("test"))
    expected = Budget(8.64e12, 100.0, 125.0, 48_000.0, 120_000.0, 33_600.0)
    assert astuple(found) == pytest.approx(astuple(expected))
