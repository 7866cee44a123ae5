"""Pipeline schedules against a brute-force simulation and worked numbers."""

import random
from dataclasses import replace
from typing import get_args

import pytest

from strata.planner.layout import Schedule
from strata.planner.pipeline.schedules import Operation, in_flight, orders, parts_of, refusal, stage_of
from strata.planner.pipeline.simulate import Simulation, Times, closed_form, even, quick_total, simulate
from strata.planner.pipeline.timeline import _box, _paler, _scale, as_text

Size = tuple[Schedule, int, int, int]  # schedule, stages, micro-batches, interleave

SMALL: list[Size] = [
    (schedule, stages, micro_batches, interleave)
    for schedule in get_args(Schedule)
    for stages in (1, 2, 3, 4)
    for micro_batches in (1, 3, 4, 6, 8)
    for interleave in (1, 2, 3)
    if refusal(schedule, stages, micro_batches, interleave) is None
]


def holder(schedule: Schedule, stages: int, interleave: int, stage: int, chunk: int) -> int:
    """The part of the model that is this chunk of a stage."""
    match schedule:
        case "dualpipe":
            return (stage, stages - 1 - stage)[chunk]
        case "zbv" | "dualpipev":
            return (stage, 2 * stages - 1 - stage)[chunk]
    return stage + chunk * stages


def brute_force(size: Size, times: Times, order_of: tuple[tuple[Operation, ...], ...]) -> list[list[tuple[float, float]]]:
    """Starts and ends of every operation: the least times that satisfy all waits, found by repeating the rules until they hold.

    A forward waits for the previous part's, a backward for the next part's backward or, in the last part, its own forward. Parts
    on one stage need no transfer. A joined pair starts when both inputs are there, and its forward leaves when both are done.
    """
    schedule, stages, _, interleave = size
    parts = stages * interleave
    hidden = times.hidden or (0.0,) * parts
    starts = [[0.0] * len(order) for order in order_of]
    leaves: dict[tuple[str, int, int, int], tuple[float, int]] = {}  # kind, micro-batch, part, direction: end and stage

    def seconds(one: Operation, part: int) -> float:
        took = {"F": times.forward, "B": times.backward, "W": times.weight}
        return sum(took[kind][part] for kind in one.kind) - (hidden[part] if one.joined else 0.0)

    def arrival(one: Operation, stage: int, part: int) -> float:
        way = one.chunk if schedule == "dualpipe" else 0
        if one.kind == "W" or (one.kind == "F" and part == 0):
            return 0.0
        if one.kind == "F":
            needed, wire = ("F", one.micro_batch, part - 1, way), part - 1
        elif part == parts - 1:
            needed, wire = ("F", one.micro_batch, part, way), part
        else:
            needed, wire = ("B", one.micro_batch, part + 1, way), part
        end, sender = leaves.get(needed, (0.0, stage))
        return end + (times.transfer[wire] if sender != stage else 0.0)

    def sends(one: Operation, stage: int, part: int) -> float:
        """Time that a blocking sender loses after an operation."""
        if not times.blocking or one.kind == "W" or (one.joined and one.kind == "F"):
            return 0.0
        step = 1 if one.kind == "F" else -1
        if not 0 <= part + step < parts:
            return 0.0
        other = place[part + step, one.chunk if schedule == "dualpipe" else 0]
        return times.transfer[min(part, part + step)] if other != stage else 0.0

    place = {}
    for stage, order in enumerate(order_of):
        for one in order:
            place[holder(schedule, stages, interleave, stage, one.chunk), one.chunk if schedule == "dualpipe" else 0] = stage
    for _ in range(10_000):
        changed = False
        for stage, order in enumerate(order_of):
            free = 0.0
            for at, one in enumerate(order):
                part = holder(schedule, stages, interleave, stage, one.chunk)
                start = max(free, arrival(one, stage, part))
                if one.joined and one.kind == "F":
                    other = order[at + 1]
                    start = max(start, arrival(other, stage, holder(schedule, stages, interleave, stage, other.chunk)))
                end = leave = start + seconds(one, part)
                if one.joined and one.kind == "F":
                    leave += seconds(other, holder(schedule, stages, interleave, stage, other.chunk))
                changed = changed or start != starts[stage][at]
                starts[stage][at] = start
                if one.kind != "W":
                    key = (one.kind[0], one.micro_batch, part, one.chunk if schedule == "dualpipe" else 0)
                    changed = changed or leaves.get(key) != (leave, stage)
                    leaves[key] = leave, stage
                free = end + sends(one, stage, part)
        if not changed:
            break
    else:
        raise AssertionError("no fixed point")
    return [
        [
            (start, start + seconds(one, holder(schedule, stages, interleave, stage, one.chunk)))
            for one, start in zip(order, starts[stage], strict=True)
        ]
        for stage, order in enumerate(order_of)
    ]


def random_times(size: Size, seed: int) -> Times:
    _, stages, _, chunks = size
    rng, parts = random.Random(f"{size}{seed}"), stages * chunks
    f, b, w = (tuple(rng.uniform(0.5, 2) for _ in range(parts)) for _ in range(3))
    transfer = tuple(rng.uniform(0.1, 0.6) for _ in range(parts - 1))
    hidden = tuple(rng.uniform(0.1, 0.3) for _ in range(parts)) if seed % 2 else ()
    return Times(f, b, w, transfer, blocking=seed > 1, hidden=hidden)


@pytest.mark.parametrize("size", SMALL, ids=str)
def test_the_simulator_equals_brute_force(size: Size) -> None:
    for seed in range(4):
        times = random_times(size, seed)
        found = simulate(*size, times)
        expected = brute_force(size, times, found.orders)
        for stage, placed in enumerate(expected):
            assert found.starts[stage] == pytest.approx([start for start, _ in placed])
            assert found.ends[stage] == pytest.approx([end for _, end in placed])
        assert found.total == pytest.approx(max(end for placed in expected for _, end in placed))
        busy = [sum(end - start for start, end in placed) for placed in expected]
        assert found.busy == pytest.approx(busy)
        assert found.bubble == pytest.approx(1 - max(busy) / found.total)
        assert found.mean_bubble == pytest.approx(1 - sum(busy) / len(busy) / found.total)


@pytest.mark.parametrize("size", SMALL, ids=str)
def test_parts_and_stages_are_inverse(size: Size) -> None:
    schedule, stages, _, interleave = size
    for stage in range(stages):
        parts = parts_of(schedule, stages, interleave, stage)
        assert len(parts) == (2 if schedule == "dualpipe" else interleave)
        for chunk, part in enumerate(parts):
            assert part == holder(schedule, stages, interleave, stage, chunk)
            assert stage_of(schedule, stages, part, chunk) == stage


def compact(size: Size, stage: int) -> str:
    """An order as text: a prime for the second chunk, two for the third, brackets around what is joined."""
    return " ".join(
        f"{'[' * one.joined}{one.kind}{one.micro_batch}{chr(39) * one.chunk}{']' * one.joined}" for one in orders(*size)[stage]
    )


ORDERS: list[tuple[Size, int, str]] = [
    (("gpipe", 3, 2, 1), 1, "F0 F1 BW0 BW1"),
    (("1f1b", 3, 4, 1), 0, "F0 F1 F2 BW0 F3 BW1 BW2 BW3"),
    (("1f1b", 3, 4, 1), 1, "F0 F1 BW0 F2 BW1 F3 BW2 BW3"),
    (("1f1b", 3, 4, 1), 2, "F0 BW0 F1 BW1 F2 BW2 F3 BW3"),
    (("1f1b", 4, 2, 1), 0, "F0 F1 BW0 BW1"),
    (("interleaved", 2, 2, 2), 0, "F0 F1 F0' F1' BW0' BW1' BW0 BW1"),
    (("interleaved", 2, 4, 2), 1, "F0 F1 F0' BW0' F1' BW1' F2 BW0 F3 BW1 F2' BW2' F3' BW3' BW2 BW3"),
    (("interleaved", 2, 2, 3), 1, "F0 F1 F0' F1' F0'' BW0'' F1'' BW1'' BW0' BW1' BW0 BW1"),
    (("zb-h1", 3, 4, 1), 0, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"),
    (("zb-h1", 3, 4, 1), 1, "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"),
    (("zb-h1", 3, 4, 1), 2, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"),
    (("zb-h1", 4, 2, 1), 3, "F0 B0 F1 B1 W0 W1"),
    (("zbv", 2, 2, 2), 0, "F0 F1 F0' B0' W0' F1' B1' W1' B0 W0 B1 W1"),
    (("zbv", 2, 2, 2), 1, "F0 F0' F1 F1' B0' W0' B0 W0 B1' W1' B1 W1"),
    (("zbv", 3, 4, 2), 0, "F0 F1 F2 F3 F0' B0' W0' F1' B1' W1' F2' B2' W2' B0 W0 F3' B3' W3' B1 W1 B2 W2 B3 W3"),
    (("zbv", 3, 4, 2), 1, "F0 F1 F2 F0' F3 F1' B0' W0' F2' B1' W1' B0 W0 F3' B2' W2' B1 W1 B3' W3' B2 B3 W2 W3"),
    (("zbv", 3, 4, 2), 2, "F0 F0' F1 F1' F2 F2' B0' W0' F3 B0 W0 F3' B1' W1' B1 W1 B2' W2' B2 B3' B3 W2 W3' W3"),
    (("dualpipe", 4, 8, 1), 0, "F0 F1 F2 F4' B4' W4' F5' [F3] [BW5'] [F6'] [BW0] BW6' [F7'] [BW1] BW7' B2 W2 B3 W3"),
    (("dualpipe", 4, 8, 1), 1, "F0 F4' F1 F5' F2 BW4' [F6'] [BW0] [F3] [BW5'] [F7'] [BW1] BW6' BW2 B7' B3 W7' W3"),
    (("dualpipe", 4, 8, 1), 2, "F4' F0 F5' F1 F6' BW0 [F2] [BW4'] [F7'] [BW1] [F3] [BW5'] BW2 BW6' B3 B7' W3 W7'"),
    (("dualpipe", 4, 8, 1), 3, "F4' F5' F6' F0 B0 W0 F1 [F7'] [BW1] [F2] [BW4'] BW2 [F3] [BW5'] BW3 B6' W6' B7' W7'"),
    (("dualpipev", 2, 4, 2), 1, "F0 F0' F1 F1' F2 BW0' [F2'] [BW0] [F3] [BW1'] [F3'] [BW1] BW2' BW2 B3' B3 W3' W3"),
]


@pytest.mark.parametrize(("size", "stage", "text"), ORDERS, ids=str)
def test_orders_by_hand(size: Size, stage: int, text: str) -> None:
    assert compact(size, stage) == text


@pytest.mark.parametrize(
    ("size", "totals"),
    [
        # (m + p - 1)(f + b + w): 8 micro-batches, 4 stages, 1 + 2 + 1.5 s
        (("gpipe", 4, 8, 1), 11 * 4.5),
        (("1f1b", 4, 8, 1), 11 * 4.5),
        (("interleaved", 4, 8, 3), 8 * 4.5 + 3 * 1.5),
        # (p - 1) max(f + b - w, f, b) = 3 x 2
        (("zb-h1", 4, 8, 1), 36 + 3 * 2),
        (("zb-h1", 4, 3, 1), None),
        (("zb-h1", 4, 4, 1), 18 + 3 * 2),
        # (p - 1) max(b / 2, b - w) = 3 x 1
        (("zbv", 4, 8, 2), 36 + 3 * 1),
        (("zbv", 4, 7, 2), 31.5 + 3 * 1),
        (("zbv", 4, 6, 2), None),
        (("dualpipe", 4, 8, 1), None),
        (("dualpipev", 4, 8, 2), None),
    ],
)
def test_closed_forms_by_hand(size: Size, totals: float | None) -> None:
    assert closed_form(*size, 1.0, 2.0, 1.5) == totals


@pytest.mark.parametrize(
    ("schedule", "chunks", "f", "b", "w", "total"),
    [
        ("zb-h1", 1, 1.0, 2.0, 0.5, 8 * 3.5 + 3 * 2.5),  # f + b - w
        ("zb-h1", 1, 2.5, 1.0, 2.0, 8 * 5.5 + 3 * 2.5),  # f
        ("zb-h1", 1, 1.0, 1.5, 2.0, 8 * 4.5 + 3 * 1.5),  # b
        ("zbv", 2, 1.0, 2.0, 0.5, 8 * 3.5 + 3 * 1.5),  # b - w
        ("zbv", 2, 2.0, 2.0, 2.0, 8 * 6.0 + 3 * 1.0),  # b / 2; f and w at their limit
        ("zbv", 2, 2.1, 2.0, 2.0, None),
        ("zbv", 2, 2.0, 2.0, 2.1, None),
        ("dualpipe", 1, 2.0, 2.0, 2.0, 8 * 6.0 + 1 * 4.0),  # (p/2 - 1)(f + 2b - w)
        ("dualpipe", 1, 2.0, 2.0, 0.5, 8 * 4.5 + 1 * 5.5),
        ("dualpipe", 1, 2.0, 2.0, 2.1, None),
        ("dualpipe", 1, 1.9, 2.0, 1.0, None),
        ("dualpipev", 2, 2.0, 2.0, 2.0, 8 * 6.0 + 3 * 4.0 / 2),  # (p - 1)(f + 2b - w)/2
        ("dualpipev", 2, 2.0, 2.0, 0.5, 8 * 4.5 + 3 * 5.5 / 2),
        ("dualpipev", 2, 2.0, 2.0, 2.1, None),
        ("dualpipev", 2, 1.9, 2.0, 1.0, None),
    ],
)
def test_closed_forms_by_their_largest_term(
    schedule: Schedule, chunks: int, f: float, b: float, w: float, total: float | None
) -> None:
    assert closed_form(schedule, 4, 8, chunks, f, b, w) == (None if total is None else pytest.approx(total))


@pytest.mark.parametrize(
    ("size", "allowed"),
    [
        (("1f1b", 1, 1, 1), True),
        (("1f1b", 0, 1, 1), False),
        (("1f1b", 1, 0, 1), False),
        (("1f1b", 1, 1, 0), False),
        (("interleaved", 4, 8, 2), True),
        (("interleaved", 4, 8, 1), False),
        (("interleaved", 4, 6, 2), False),
        (("zbv", 4, 1, 2), True),
        (("zbv", 4, 1, 3), False),
        (("dualpipe", 4, 8, 1), True),
        (("dualpipe", 4, 7, 1), False),
        (("dualpipe", 4, 9, 1), False),
        (("dualpipe", 3, 8, 1), False),
        (("dualpipe", 4, 8, 2), False),
        (("dualpipev", 4, 8, 2), True),
        (("dualpipev", 3, 7, 2), True),
        (("dualpipev", 4, 7, 2), False),
        (("gpipe", 4, 3, 1), True),
    ],
)
def test_sizes_on_both_sides_of_each_rule(size: Size, allowed: bool) -> None:
    assert (refusal(*size) is None) == allowed


@pytest.mark.parametrize(("micro_batches", "nearest"), [(1, 4), (5, 4), (7, 8), (13, 12), (15, 16)])
def test_refused_interleaving_has_the_nearest_multiple(micro_batches: int, nearest: int) -> None:
    error = refusal("interleaved", 4, micro_batches, 2)
    assert error is not None and error.fix == f"micro_batches={nearest} works"


@pytest.mark.parametrize(
    ("size", "stage", "most"),
    [
        (("gpipe", 4, 9, 1), 2, 9),
        (("1f1b", 4, 9, 1), 1, 3),
        (("1f1b", 4, 2, 1), 1, 2),
        (("interleaved", 4, 8, 2), 1, (4 * 2 + 4 - 2 - 1) / 2),
        (("interleaved", 4, 4, 2), 0, 4),
        (("zb-h1", 4, 9, 1), 3, 4),
        (("zbv", 4, 9, 2), 1, 4),
        (("zbv", 4, 4, 2), 1, 3),
        (("dualpipev", 4, 9, 2), 1, 4.5),
        (("dualpipe", 4, 8, 1), 1, 2.5),
    ],
)
def test_micro_batches_in_flight_by_hand(size: Size, stage: int, most: float) -> None:
    assert in_flight(*size, stage) == most


def test_the_simulation_reports_micro_batches_of_the_whole_model() -> None:
    """Both of a stage's parts count in dualpipe, where each part of the model lives on two stages."""
    assert simulate("dualpipe", 4, 8, 1, even(4, 1, 1, 1)).in_flight == (5.0,) * 4
    assert simulate("1f1b", 4, 8, 1, even(4, 1, 1, 1)).in_flight == (4, 3, 2, 1)


def test_even_parts_have_one_transfer_fewer() -> None:
    times = even(3, 1.0, 2.0, 3.0, 0.5, blocking=True)
    assert times == Times((1.0,) * 3, (2.0,) * 3, (3.0,) * 3, (0.5, 0.5), True)
    assert even(3, 1.0, 2.0, 3.0).transfer == (0.0, 0.0) and not even(3, 1.0, 2.0, 3.0).blocking


# The fast total of searches

STAGES = 4
UNEVEN = Times((1.0, 1.3, 0.9, 1.2), (1.1, 0.8, 1.4, 1.0), (0.9, 1.0, 1.1, 0.7), (0.2, 0.1, 0.3))


def totals(times: Times, schedule: Schedule = "1f1b") -> dict[int, float]:
    return {m: simulate(schedule, STAGES, m, 1, times).total for m in (25, 49, 73, 74, 75, 101, 301)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_fast_total_extends_the_steady_state(schedule: Schedule) -> None:
    """For 4 stages and 301 micro-batches: simulated for 24 + 301 % 4 = 25 and 49, and from there on at their mean pace."""
    found = totals(UNEVEN, schedule)
    pace = (found[49] - found[25]) / 24
    assert quick_total(schedule, STAGES, 301, 1, UNEVEN) >= found[49] + 252 * pace - 1e-9
    assert quick_total(schedule, STAGES, 301, 1, UNEVEN) == pytest.approx(found[301], rel=1e-3)


@pytest.mark.parametrize("micro_batches", [73, 74])
def test_the_fast_total_is_simulated_up_to_twice_the_window(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """25 + 49 = 74 for 73 micro-batches; 26 + 50 = 76 for 74."""
    assert quick_total("1f1b", STAGES, micro_batches, 1, UNEVEN) == pytest.approx(totals(UNEVEN)[micro_batches], rel=1e-12)


@pytest.mark.parametrize(("micro_batches", "few"), [(300, 36), (301, 37), (108, 36)])
def test_twelve_stages_are_simulated_for_three_rounds_and_two_more(micro_batches: int, few: int) -> None:
    """3 x 12 micro-batches and the remainder, and 24 more. These parts have not settled by then, so another window differs."""
    rng = random.Random(11)
    f, b, w = (tuple(round(rng.uniform(0.8, 1.2), 2) for _ in range(12)) for _ in range(3))
    times = Times(f, b, w, tuple(round(rng.uniform(0.1, 0.4), 2) for _ in range(11)))

    def extended(few: int) -> float:
        first, second = (simulate("1f1b", 12, count, 1, times).total for count in (few, few + 24))
        return second + (micro_batches - few - 24) * (second - first) / 24

    assert quick_total("1f1b", 12, micro_batches, 1, times) == pytest.approx(extended(few), rel=1e-12)
    assert extended(few + 12) != pytest.approx(extended(few), rel=1e-4)


SLOW: list[tuple[Schedule, int, bool]] = [
    (schedule, chunks, blocking)
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("dualpipe", 1), ("dualpipev", 2))
    for blocking in (False, True)
]


@pytest.mark.parametrize(("schedule", "chunks", "blocking"), SLOW)
@pytest.mark.parametrize("slow", [0, 2])
def test_the_fast_total_of_a_slow_part_is_exact(schedule: Schedule, chunks: int, blocking: bool, slow: int) -> None:
    parts = STAGES * chunks
    seconds = tuple(1.1 if part == slow else 1.0 for part in range(parts))
    hidden = (0.1,) * parts if schedule.startswith("dual") else ()
    times = Times(seconds, seconds, seconds, (0.1,) * (parts - 1), blocking, hidden)
    exact = simulate(schedule, STAGES, 600, chunks, times).total
    assert quick_total(schedule, STAGES, 600, chunks, times) == pytest.approx(exact, rel=5e-4)


def test_a_slow_stage_behind_slack_sets_the_pace() -> None:
    """The first part is 2% slower. At 49 micro-batches slack still hides that; extending their pace is 0.6% too fast at 601."""
    seconds = (1.02, *(1.0,) * 7)
    times = Times(seconds, seconds, seconds, (0.3,) * 7)
    few, more, exact = (simulate("zbv", STAGES, count, 2, times).total for count in (25, 49, 601))
    assert more + 552 * (more - few) / 24 < 0.995 * exact
    assert quick_total("zbv", STAGES, 601, 2, times) == pytest.approx(exact, rel=1e-9)


def test_equal_parts_have_the_closed_form() -> None:
    """The share of a stage is the sum over its chunks: 2 x (1 + 2 + 1.5) s."""
    assert quick_total("interleaved", 4, 8, 2, even(8, 1.0, 2.0, 1.5)) == pytest.approx(8 * 9 + 3 * 4.5)


def test_hidden_communication_is_not_in_the_closed_form() -> None:
    times = replace(even(4, 2.0, 2.0, 2.0), hidden=(0.3, 0.0, 0.0, 0.0))
    assert quick_total("dualpipe", 4, 8, 1, times) == pytest.approx(simulate("dualpipe", 4, 8, 1, times).total)
    assert quick_total("dualpipe", 4, 8, 1, times) < 52.0  # the closed form


# Timelines


def test_a_timeline_of_split_backwards() -> None:
    """18 s in 36 columns: operations of 1 and 2 s are 2 and 4 columns wide."""
    found = simulate("zb-h1", 2, 2, 1, even(2, 1.0, 2.0, 1.0))
    assert as_text(found, 8 + 2 * round(found.total)).splitlines() == [
        "stage 0 F0F1····b0--w0b1--w1",
        "stage 1 ··F0b0--F1b1--w0w1··",
        "10 seconds, 20.0% bubble; F forward, b backward of inputs, w backward of weights, · idle",
    ]


def test_narrow_operations_have_their_letter_alone() -> None:
    found = simulate("gpipe", 1, 12, 1, even(1, 1.0, 1.0, 1.0))
    line = as_text(found, 8 + 36).splitlines()[0]
    assert line == "stage 0 " + "F" * 12 + "".join(f"B{i}" if i < 10 else "BB" for i in range(12))


@pytest.mark.parametrize(
    ("seconds", "scale"),
    [
        (1.0, (1.0, "seconds")),
        (0.999, (1e3, "milliseconds")),
        (1e-3, (1e3, "milliseconds")),
        (0.999e-3, (1e6, "microseconds")),
    ],
)
def test_the_unit_of_a_timeline(seconds: float, scale: tuple[float, str]) -> None:
    assert _scale(seconds) == scale


def test_boxes_and_colours() -> None:
    assert _box(2, 1.0, 3.0) == [(1.0, 1.57), (3.0, 1.57), (3.0, 2.43), (1.0, 2.43)]
    assert _paler("#005aff", 0.0) == "#005aff"
    assert _paler("#005aff", 0.5) == "#80acff"  # 0 + 127.5, 90 + 82.5, 255


def test_placed_operations_have_their_times() -> None:
    found: Simulation = simulate("1f1b", 1, 1, 1, even(1, 1.0, 2.0, 3.0))
    assert [(one.operation.kind, one.start, one.end) for one in found.placed(0)] == [("F", 0.0, 1.0), ("BW", 1.0, 6.0)]
