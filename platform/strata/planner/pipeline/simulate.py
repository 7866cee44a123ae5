"""Discrete-event simulation of a pipeline schedule with the time of each operation."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

from strata.planner.layout import Schedule
from strata.planner.pipeline.schedules import Kind, Operation, Order, check, in_flight, orders, parts_of, stage_of


@dataclass(frozen=True)
class Times:
    """Seconds of one micro-batch in each part of the model, from its input to its output: stages x interleave of them.

    `backward` is the gradient of a part's input, `weight` that of its weights. `transfer` is from a part to the next, so one
    fewer, and as long for gradients on the way back; parts of one stage need none. It starts when the operation ends; the
    receiver waits for it, the sender only if `blocking`. `hidden` is how much less a part's forward, and its backward, take
    in one of dualpipe's pairs, in which the other's work covers the communication inside the part.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    blocking: bool = False
    hidden: tuple[float, ...] = ()


def even(parts: int, f: float, b: float, w: float, transfer: float = 0.0, blocking: bool = False) -> Times:
    """Times of equal parts; f, b and w are those of one part."""
    return Times((f,) * parts, (b,) * parts, (w,) * parts, (transfer,) * (parts - 1), blocking)


class Placed(NamedTuple):
    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    schedule: Schedule
    stages: int
    micro_batches: int
    interleave: int
    total: float  # seconds until the last stage is done
    busy: tuple[float, ...]  # seconds a stage computes
    in_flight: tuple[float, ...]  # micro-batches that each stage holds at most, in units of 1 / stages of the model
    orders: tuple[Order, ...]
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]

    @property
    def bubble(self) -> float:
        """Fraction of the time in which the busiest stage is idle."""
        return 1 - max(self.busy) / self.total

    @property
    def mean_bubble(self) -> float:
        """Mean fraction of the time in which stages are idle, by the schedule or by unequal work."""
        return 1 - sum(self.busy) / (self.stages * self.total)

    def placed(self, stage: int) -> Iterator[Placed]:
        return map(Placed, self.orders[stage], self.starts[stage], self.ends[stage])


def simulate(schedule: Schedule, stages: int, micro_batches: int, interleave: int, times: Times) -> Simulation:
    order_of = orders(schedule, stages, micro_batches, interleave)
    ways_of = [_ways(schedule, stages, interleave, stage, times) for stage in range(stages)]
    share = 2 if schedule == "dualpipe" else 1  # every part of the model lives on two stages
    starts, ends = _play(order_of, ways_of, micro_batches, times.blocking)
    return Simulation(
        schedule,
        stages,
        micro_batches,
        interleave,
        total=max(end[-1] for end in ends),
        busy=tuple(sum(map(sub, end, start)) for start, end in zip(starts, ends, strict=True)),
        in_flight=tuple(share * in_flight(schedule, stages, micro_batches, interleave, stage) for stage in range(stages)),
        orders=order_of,
        starts=starts,
        ends=ends,
    )


def closed_form(
    schedule: Schedule, stages: int, micro_batches: int, interleave: int, f: float, b: float, w: float
) -> float | None:
    """Seconds by formula, where f, b and w are those of a stage's whole share, alike on all stages, and transfers take none.

    gpipe, 1f1b   (m + p - 1)(f + b + w)
    interleaved   m(f + b + w) + (p - 1)(f + b + w)/v
    zb-h1         m(f + b + w) + (p - 1) max(f + b - w, f, b)     for m >= p. The paper has the first term of the maximum,
                                                                  for f = b = w; the others are the first stage's lead
                                                                  and the last gradient's way, which W cannot shorten.
    zbv           m(f + b + w) + (p - 1) max(b/2, b - w)          for m >= 2p - 1, f <= b and w <= b. The paper's "zero" is
                                                                  without stages' lead on each other, (p - 1)f/2, which it
                                                                  lets the next step's forwards use.
    dualpipe      m(f + b + w) + (p/2 - 1)(f + 2b - w)            for f = b and w <= b: its README's (F&B + B - 3W), whose B
    dualpipev     m(f + b + w) + (p - 1)(f + 2b - w)/2            is both gradients and whose pair F&B takes as long as both

    None where none is known.
    """
    check(schedule, stages, micro_batches, interleave)
    p, m, v, work = stages, micro_batches, interleave, f + b + w
    match schedule:
        case "gpipe" | "1f1b":
            return (m + p - 1) * work
        case "interleaved":
            return m * work + (p - 1) * work / v
        case "zb-h1" if m >= p:
            return m * work + (p - 1) * max(f + b - w, f, b)
        case "zbv" if m >= 2 * p - 1 and f <= b and w <= b:
            return m * work + (p - 1) * max(b / 2, b - w)
        case "dualpipe" if f == b and w <= b:
            return m * work + (p / 2 - 1) * (f + 2 * b - w)
        case "dualpipev" if f == b and w <= b:
            return m * work + (p - 1) * (f + 2 * b - w) / 2
    return None


FEW = 24  # micro-batches, over which the unrest evens out of a steady state whose period is not the number of stages


def quick_total(schedule: Schedule, stages: int, micro_batches: int, interleave: int, times: Times) -> float:
    """The total, for searches: by formula, or simulated for few micro-batches and from there on as each further one adds.

    Slack can hide for long that a stage is too slow to keep up. Hence the second bound: the longest chain of work through
    the busiest stage, which every further micro-batch makes longer by that stage's work. Exact up to 7 x stages (and
    3 x FEW) micro-batches at least; beyond, within 0.5% of the simulation for parts that differ by a tenth.
    """
    alike = len({*zip(times.forward, times.backward, times.weight, strict=True)}) == 1
    if alike and not any(times.transfer) and not any(times.hidden):
        f, b, w = (interleave * seconds[0] for seconds in (times.forward, times.backward, times.weight))
        formula = closed_form(schedule, stages, micro_batches, interleave, f, b, w)
        if formula is not None:
            return formula
    window = stages * math.ceil(FEW / stages)
    few = max(3 * stages, window) + micro_batches % stages
    more = few + window
    ways_of = [_ways(schedule, stages, interleave, stage, times) for stage in range(stages)]
    if micro_batches <= few + more:
        return _last(_play(orders(schedule, stages, micro_batches, interleave), ways_of, micro_batches, times.blocking))
    first = _last(_play(orders(schedule, stages, few, interleave), ways_of, few, times.blocking))
    order_of = orders(schedule, stages, more, interleave)
    second = _last(_play(order_of, ways_of, more, times.blocking))
    pace = (second - first) / window
    result = second + (micro_batches - more) * pace
    paces = [_pace(schedule, ways, times.blocking) for ways in ways_of]
    slowest = paces.index(max(paces))
    if paces[slowest] > pace:
        chain = _longest_chain(order_of, ways_of, more, times.blocking, slowest, second)
        result = max(result, chain + (micro_batches - more) * paces[slowest])
    return result


class _Way(NamedTuple):
    """Time of one kind of operation on one chunk, and the receiver of its result.

    A micro-batch passes 2 x parts steps, forward and back; step k + 1 needs the result of step k. W is not a step (-1).
    """

    step: int
    seconds: float
    transfer: float
    receiver: int


_Ways = dict[tuple[Kind, int, bool], _Way]  # by kind, chunk and whether joined
_Played = tuple[tuple[list[float], ...], tuple[list[float], ...]]  # starts and ends of each stage's operations


def _ways(schedule: Schedule, stages: int, interleave: int, stage: int, times: Times) -> _Ways:
    parts = stages * interleave
    assert len(times.forward) == len(times.backward) == len(times.weight) == len(times.transfer) + 1 == parts
    ways: _Ways = {}
    for chunk, part in enumerate(parts_of(schedule, stages, interleave, stage)):
        f, b, w = times.forward[part], times.backward[part], times.weight[part]
        hidden = times.hidden[part] if times.hidden else 0.0
        after = stage_of(schedule, stages, part + 1, chunk) if part + 1 < parts else stage
        before = stage_of(schedule, stages, part - 1, chunk) if part else stage
        there = times.transfer[part] if after != stage else 0.0
        back = times.transfer[part - 1] if before != stage else 0.0
        returning = 2 * parts - 1 - part
        ways["F", chunk, False] = _Way(part, f, there, after)
        ways["F", chunk, True] = _Way(part, f - hidden, there, after)
        ways["B", chunk, False] = _Way(returning, b, back, before)
        ways["BW", chunk, False] = _Way(returning, b + w, back, before)
        ways["BW", chunk, True] = _Way(returning, b + w - hidden, back, before)
        ways["W", chunk, False] = _Way(-1, w, 0.0, stage)
    return ways


def _play(order_of: tuple[Order, ...], ways_of: list[_Ways], micro_batches: int, blocking: bool) -> _Played:
    """Starts and ends of all operations. A stage runs until an input is missing, and resumes when that input is produced, so each
    operation is visited once or twice."""
    m, stages = micro_batches, len(order_of)
    steps = 1 + max(way.step for way in ways_of[0].values())  # stage 0 has the last: the gradient of the model's first part
    arrived = [0.0] * m + [-1.0] * (steps * m)  # when the input of step k for micro-batch i is there: [k * m + i]
    starts: tuple[list[float], ...] = tuple([] for _ in range(stages))
    ends: tuple[list[float], ...] = tuple([] for _ in range(stages))
    free = [0.0] * stages
    lacks = [-1] * stages
    runnable = deque(range(stages))
    while runnable:
        stage = runnable.popleft()
        order, ways, now = order_of[stage], ways_of[stage], free[stage]
        for at in range(len(starts[stage]), len(order)):
            kind, i, chunk, joined = order[at]
            step, seconds, transfer, receiver = ways[kind, chunk, joined]
            start = now
            if step >= 0:
                ready = arrived[step * m + i]
                if ready < 0:
                    lacks[stage] = step * m + i
                    break
                if ready > start:
                    start = ready
                given, leaves = (step + 1) * m + i, start + seconds
                if joined and kind == "F":  # waits for the other's input too, and gives its result when both are done
                    _, i, chunk, _ = order[at + 1]
                    other = ways["BW", chunk, True]
                    ready = arrived[other.step * m + i]
                    if ready < 0:
                        lacks[stage] = other.step * m + i
                        break
                    start = max(start, ready)
                    leaves = start + seconds + other.seconds
                arrived[given] = leaves + transfer
                if lacks[receiver] == given:
                    lacks[receiver] = -1
                    runnable.append(receiver)
            starts[stage].append(start)
            now = start + seconds
            ends[stage].append(now)
            if blocking and not (joined and kind == "F"):
                now += transfer
        free[stage] = now
    assert all(len(end) == len(order) for end, order in zip(ends, order_of, strict=True)), "stages wait for each other"
    return starts, ends


def _last(played: _Played) -> float:
    return max(end[-1] for end in played[1])


def _pace(schedule: Schedule, ways: _Ways, blocking: bool) -> float:
    """Lower bound on the time that one more micro-batch occupies a stage."""
    paired = schedule in ("dualpipe", "dualpipev")
    result = 0.0
    for (kind, _, joined), way in ways.items():
        if kind in ("F", "BW") and joined == paired:
            result += way.seconds
            if blocking and not (joined and kind == "F"):
                result += way.transfer
    return result / 2 if schedule == "dualpipe" else result  # half of its micro-batches run in each direction


def _longest_chain(
    order_of: tuple[Order, ...], ways_of: list[_Ways], micro_batches: int, blocking: bool, stage: int, total: float
) -> float:
    """Longest chain of operations through the middle of a stage's order.

    The operation there is lengthened by `total`, so that no other chain matters, and simulated as a chunk of its own.
    """
    order, ways, longer = list(order_of[stage]), dict(ways_of[stage]), -1
    middle = len(order) // 2
    kind, i, chunk, joined = order[middle]
    order[middle] = Operation(kind, i, longer, joined)
    ways[kind, longer, joined] = ways[kind, chunk, joined]._replace(seconds=ways[kind, chunk, joined].seconds + total)
    order_of = (*order_of[:stage], tuple(order), *order_of[stage + 1 :])
    return _last(_play(order_of, [*ways_of[:stage], ways, *ways_of[stage + 1 :]], micro_batches, blocking)) - total
