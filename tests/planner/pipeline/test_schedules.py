import random
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from support import within

from strata.planner.layout import Schedule
from strata.planner.pipeline.schedules import CHUNKS, IN_FLIGHT, Operation, in_flight, orders, parts_of, refusal, stage_of
from strata.planner.pipeline.simulate import Simulation, Times, closed_form, even, quick_total, simulate
from strata.planner.pipeline.timeline import as_text, draw
from strata.platform.errors import UserError

Size = tuple[Schedule, int, int, int]  # schedule, stages, micro-batches, interleave

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
SIZES: list[Size] = [
    (schedule, stages, micro_batches, interleave)
    for schedule in SCHEDULES
    for stages in (1, 2, 3, 4, 8)
    for micro_batches in (1, 5, 8, 16, 24, 33)
    for interleave in (1, 2, 3)
    if refusal(schedule, stages, micro_batches, interleave) is None
]


def shares(size: Size, f: float, b: float, w: float) -> Times:
    """Stage times f, b and w, summed over the chunks of a stage."""
    _, stages, _, chunks = size
    return even(stages * chunks, f / chunks, b / chunks, w / chunks)


def uneven(size: Size, rng: random.Random, by: float) -> Times:
    """Random times that differ by up to this share; the last part is slower because of the output matrix."""
    _, stages, _, chunks = size
    parts = stages * chunks
    f, b, w = ([rng.uniform(1 - by, 1 + by) for _ in range(parts)] for _ in range(3))
    for one in (f, b, w):
        one[-1] *= rng.choice((1.0, 1.3))
    longest = rng.choice((0.0, 0.02, 0.1, 0.3))
    transfer = tuple(rng.uniform(0.5, 1) * longest for _ in range(parts - 1))
    return Times(tuple(f), tuple(b), tuple(w), transfer, blocking=rng.random() < 0.3)


def operations(text: str) -> list[tuple[str, int, int]]:
    """Compact form as in the papers' figures: kind, micro-batch, and a prime for the second chunk."""
    return [(word.rstrip("0123456789'"), int(word.strip("FBW'")), int(word.endswith("'"))) for word in text.split()]


def order(size: Size, stage: int) -> list[tuple[str, int, int]]:
    return [(one.kind, one.micro_batch, one.chunk) for one in orders(*size)[stage]]


def test_every_schedule_is_tried() -> None:
    assert {size[0] for size in SIZES} == set(SCHEDULES)
    assert len(SIZES) > 100


@pytest.mark.parametrize("size", SIZES)
def test_every_micro_batch_runs_once_on_each_part(size: Size) -> None:
    schedule, stages, micro_batches, interleave = size
    seen: dict[tuple[str, int, int], int] = {}
    for stage, stage_order in enumerate(orders(*size)):
        parts = parts_of(schedule, stages, interleave, stage)
        for operation in stage_order:
            assert stage_of(schedule, stages, parts[operation.chunk], operation.chunk) == stage
            for kind in operation.kind:  # BW is both
                key = (kind, operation.micro_batch, parts[operation.chunk])
                seen[key] = seen.get(key, 0) + 1
    expected = {(kind, i, part) for kind in "FBW" for i in range(micro_batches) for part in range(stages * interleave)}
    assert set(seen) == expected
    assert set(seen.values()) == {1}


def test_orders_match_the_figures_of_the_papers() -> None:
    # Megatron-LM's figure 4, first device: 4 stages, 8 micro-batches, 2 chunks; counted from 0
    warm = "F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 "
    steady = "F6 BW0' F7 BW1' F4' BW2' F5' BW3' F6' BW0 F7' BW1 "
    assert order(("interleaved", 4, 8, 2), 0) == operations(warm + steady + "BW2 BW3 BW4' BW5' BW6' BW7' BW4 BW5 BW6 BW7")
    # the zero-bubble paper's figure 3, ZB-H1, last device
    ending = "F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7"
    assert order(("zb-h1", 4, 8, 1), 3) == operations("F0 B0 F1 B1 F2 B2 " + ending)
    # DualPipe's README, device 7: 8 devices, 20 micro-batches; 10 to 19 enter here
    row = order(("dualpipe", 8, 20, 1), 7)
    assert row[:14] == operations("F10' F11' F12' F13' F14' F15' F16' F0 B0 W0 F1 B1 W1 F2")
    assert row[-8:] == operations("B16' W16' B17' W17' B18' W18' B19' W19'")


@pytest.mark.parametrize("size", SIZES)
def test_no_operation_starts_before_its_input_or_while_its_stage_is_busy(size: Size) -> None:
    schedule, stages, _, interleave = size
    times = uneven(size, random.Random(str(size)), by=0.3)
    simulation = simulate(*size, times)
    starts: dict[tuple[str, int, int], float] = {}
    ends: dict[tuple[str, int, int], float] = {}
    for stage in range(stages):
        parts, now = parts_of(schedule, stages, interleave, stage), 0.0
        for operation, start, end in simulation.placed(stage):
            assert start >= now - 1e-9
            now = end
            for kind in operation.kind:
                starts[kind, operation.micro_batch, parts[operation.chunk]] = start
                ends[kind, operation.micro_batch, parts[operation.chunk]] = end
    last = stages * interleave - 1
    for (kind, i, part), start in starts.items():
        if kind == "F" and part:
            assert start >= ends["F", i, part - 1] - 1e-9
        if kind == "B":
            assert start >= ends[("B", i, part + 1) if part < last else ("F", i, part)] - 1e-9
        if kind == "W":
            assert ends["W", i, part] >= ends["B", i, part] - 1e-9


@pytest.mark.parametrize("size", SIZES)
def test_the_simulator_equals_the_closed_form(size: Size) -> None:
    rng, known = random.Random(str(size)), 0
    times = [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 2.0, 1.5), (2.0, 1.0, 3.0)] + [
        (rng.uniform(0.1, 3), rng.uniform(0.1, 3), rng.uniform(0.1, 3)) for _ in range(4)
    ]
    for f, b, w in times:
        formula = closed_form(*size, f, b, w)
        if formula is not None:
            known += 1
            assert simulate(*size, shares(size, f, b, w)).total == pytest.approx(formula, rel=1e-12)
    assert known >= 2 or size[2] < 2 * size[1] - 1


def test_published_bubbles() -> None:
    """In units of F = B = W, in addition to the 3 x 16 of 16 micro-batches. Stages are devices."""
    bubbles = {
        size[0]: simulate(*size, shares(size, 1, 1, 1)).total - 48
        for size in (
            ("gpipe", 8, 16, 1),
            ("1f1b", 8, 16, 1),
            ("interleaved", 8, 16, 2),
            ("zb-h1", 8, 16, 1),
            ("zbv", 8, 16, 2),
            ("dualpipe", 8, 16, 1),
            ("dualpipev", 8, 16, 2),
        )
    }
    expected = {"gpipe": 21, "1f1b": 21, "interleaved": 10.5, "zb-h1": 7, "zbv": 3.5, "dualpipe": 6, "dualpipev": 7}
    assert bubbles == pytest.approx(expected)


def held(schedule: Schedule, stages: int, micro_batches: int, interleave: int) -> tuple[float, ...]:
    return tuple(in_flight(schedule, stages, micro_batches, interleave, stage) for stage in range(stages))


def test_activations_in_flight_match_published_figures() -> None:
    for m in (3, 8, 40):
        assert held("gpipe", 8, m, 1) == (m,) * 8
        assert held("1f1b", 8, m, 1) == tuple(min(m, 8 - stage) for stage in range(8))
        assert held("zb-h1", 8, m, 1) == (min(m, 8),) * 8
    for p, v in ((4, 2), (8, 3)):  # Korthikanti et al.: 1 + (p - 1)/(p v) times 1f1b's p
        assert held("interleaved", p, 8 * p, v)[0] == pytest.approx(p * (1 + (p - 1) / (p * v)))
    assert held("zbv", 8, 40, 2) == (8,) * 8  # as much as 1f1b's first stage
    assert held("dualpipe", 8, 40, 1) == (9 / 2,) * 8  # PP + 1 by the README, of one of the stage's two parts
    assert held("dualpipev", 4, 40, 2) == (4.5,) * 4  # as many for 8 parts, each half a stage's share


@pytest.mark.parametrize("schedule", list(IN_FLIGHT))
def test_activations_in_flight_match_the_order(schedule: Schedule) -> None:
    for stages, micro_batches in product((1, 2, 4, 6), (1, 2, 4, 6, 12, 24, 50, 62)):
        for interleave in (2, 3) if schedule == "interleaved" else (CHUNKS[schedule],):
            if refusal(schedule, stages, micro_batches, interleave):
                continue
            size = schedule, stages, micro_batches, interleave
            parts = len(parts_of(schedule, stages, interleave, 0))
            assert held(*size) == tuple(most_held(order) / parts for order in orders(*size))
            share = 2 if schedule == "dualpipe" else 1
            assert simulate(*size, shares(size, 1, 1, 1)).in_flight == tuple(share * each for each in held(*size))


def most_held(order: Iterable[Operation]) -> int:
    """The most chunks between their F and the end of their W."""
    now = most = 0
    for operation in order:
        now += {"F": 1, "B": 0}.get(operation.kind, -1)
        most = max(most, now)
    return most


@pytest.mark.parametrize("size", SIZES)
def test_properties(size: Size) -> None:
    schedule, stages, micro_batches, interleave = size
    rng = random.Random(str(size))
    times = uneven(size, rng, by=0.2)
    simulation = simulate(*size, times)
    assert simulation.total >= max(simulation.busy) - 1e-9
    work = sum(times.forward) + sum(times.backward) + sum(times.weight)
    assert sum(simulation.busy) == pytest.approx(micro_batches * work)
    assert 0 <= simulation.bubble <= simulation.mean_bubble + 1e-12 < 1

    longer = tuple(seconds + rng.choice((0.0, 0.1, 1.0)) for seconds in times.transfer)
    slower = Times(times.forward, times.backward, times.weight, longer, times.blocking)
    assert simulate(*size, slower).total >= simulation.total - 1e-9
    waiting = Times(times.forward, times.backward, times.weight, times.transfer, blocking=True)
    assert simulate(*size, waiting).total >= simulation.total - 1e-9

    more = next(m for m in range(micro_batches + 1, 100) if refusal(schedule, stages, m, interleave) is None)
    f, b, w = (rng.uniform(0.5, 2) for _ in range(3))
    fewer_idle = simulate(schedule, stages, more, interleave, shares(size, f, b, w)).bubble
    assert fewer_idle <= simulate(*size, shares(size, f, b, w)).bubble + 1e-9


def test_receivers_wait_for_transfers_and_senders_only_when_blocking() -> None:
    free = simulate("1f1b", 2, 2, 1, even(2, 1, 1, 1, transfer=0.5))
    # stage 0: F F, then returning gradients; stage 1: its first input arrives at 1.5
    assert free.starts == ([0, 1, 5, 8], [1.5, 2.5, 4.5, 5.5])
    blocking = simulate("1f1b", 2, 2, 1, even(2, 1, 1, 1, transfer=0.5, blocking=True))
    assert blocking.starts == ([0, 1.5, 5, 8.5], [1.5, 2.5, 5, 6])


def test_paired_passes_overlap_communication() -> None:
    plain = even(4, 1.0, 1.0, 1.0)
    hiding = Times(plain.forward, plain.backward, plain.weight, plain.transfer, hidden=(0.2,) * 4)
    totals = [simulate("dualpipe", 4, 40, 1, times).total for times in (plain, hiding)]
    pairs = sum(operation.joined for operation in orders("dualpipe", 4, 40, 1)[0])
    assert pairs > 60
    assert totals[0] - totals[1] == pytest.approx(0.2 * pairs, rel=0.05)


@pytest.mark.parametrize(
    ("size", "value", "works"),
    [
        (("interleaved", 4, 10, 2), "micro_batches=10", "micro_batches=8"),
        (("interleaved", 4, 1, 2), "micro_batches=1", "micro_batches=4"),
        (("interleaved", 4, 8, 1), "interleave=1", "interleave=2"),
        (("1f1b", 4, 8, 2), "interleave=2", "interleave=1"),
        (("zbv", 4, 8, 1), "interleave=1", "interleave=2"),
        (("dualpipe", 5, 20, 1), "stages=5", "stages=6"),
        (("dualpipe", 4, 6, 1), "micro_batches=6", "micro_batches=8"),
        (("dualpipe", 4, 9, 1), "micro_batches=9", "micro_batches=10"),
        (("dualpipev", 4, 7, 2), "micro_batches=7", "micro_batches=8"),
        (("gpipe", 0, 4, 1), "stages=0", "stages=1"),
    ],
)
def test_invalid_sizes_are_refused_with_a_valid_one(size: Size, value: str, works: str) -> None:
    for ask in (lambda: orders(*size), lambda: closed_form(*size, 1, 1, 1)):
        with pytest.raises(UserError) as error:
            ask()
        assert value in error.value.cause
        assert error.value.fix.startswith(f"{works} works")


def test_a_deadlocked_order_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = ((Operation("BW", 0, 0), Operation("F", 0, 0)), (Operation("F", 0, 0), Operation("BW", 0, 0)))
    monkeypatch.setattr("strata.planner.pipeline.simulate.orders", lambda *size: stuck)
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate("1f1b", 2, 1, 1, even(2, 1, 1, 1))


LARGE: list[Size] = [
    ("gpipe", 4, 203, 1),
    ("1f1b", 4, 151, 1),
    ("1f1b", 12, 230, 1),
    ("interleaved", 6, 240, 2),
    ("interleaved", 8, 160, 4),
    ("zb-h1", 8, 201, 1),
    ("zbv", 8, 145, 2),
    ("dualpipe", 8, 150, 1),
    ("dualpipev", 6, 127, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("size", LARGE)
def test_the_fast_total_equals_the_simulation(size: Size) -> None:
    rng = random.Random(str(size))
    for _ in range(8):
        times = uneven(size, rng, by=0.1)
        assert quick_total(*size, times) == pytest.approx(simulate(*size, times).total, rel=0.005)
    for transfer in (0.0, 0.1):
        alike = even(size[1] * size[3], 1.0, 1.1, 0.9, transfer)
        assert quick_total(*size, alike) == pytest.approx(simulate(*size, alike).total, rel=0.001)


@pytest.mark.parametrize("size", SIZES[::3])
def test_the_fast_total_of_few_micro_batches_is_exact(size: Size) -> None:
    times = uneven(size, random.Random(str(size)), by=0.3)
    assert quick_total(*size, times) == pytest.approx(simulate(*size, times).total, rel=1e-12)


@pytest.mark.slow
def test_a_quarter_of_a_million_operations_take_less_than_a_second() -> None:
    with within(1):
        simulation = simulate("interleaved", 64, 512, 4, even(256, 1, 1, 1, 0.1))
    assert sum(map(len, simulation.orders)) == 2 * 64 * 512 * 4


@pytest.fixture
def small() -> Simulation:
    return simulate("1f1b", 2, 3, 1, even(2, 1, 1, 1))


def test_timeline_as_text(small: Simulation) -> None:
    assert as_text(small, 32).splitlines() == [
        "stage 0 F0F1····B0--F2B1--··B2--",
        "stage 1 ··F0B0--F1B1--F2B2--····",
        "12 seconds, 25.0% bubble; F forward, B backward, · idle",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [("1f1b", 2, 3, 1), ("dualpipe", 4, 10, 1), ("interleaved", 4, 8, 3)])
def test_timeline_as_an_image(size: Size, tmp_path: Path) -> None:
    draw(simulate(*size, even(size[1] * size[3], 1e-3, 1e-3, 1e-3)), tmp_path / "timeline.png", "a title")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
