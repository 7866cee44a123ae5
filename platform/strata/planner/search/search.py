"""Search for the best parallel layouts by time, cost or GPU count."""

import time
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from strata.planner import ranges
from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.checks import check_positions
from strata.planner.layout import TrainingPrecision
from strata.planner.search.best_first import BestFirst, Candidate
from strata.planner.search.memory_bounds import MemoryBounds
from strata.planner.search.no_fit import nothing_fits, smallest
from strata.planner.search.pareto import front
from strata.planner.search.space import ANYTHING, SLACK, Batch, Limits
from strata.planner.search.time_bounds import TimeBounds
from strata.planner.units import short
from strata.platform.errors import UserError
from strata.platform.hardware.specs import Fabric, Gpu

Goal = Literal["time", "cost", "gpus"]


@dataclass(frozen=True)
class SearchResult:
    """`by_gpus` has the fastest layout for each GPU count, and `pareto` their Pareto front over time and cost. The memory of
    `considered` layouts was computed, and `fitting` of them fit. Lower bounds excluded all others, whole groups at a time."""

    best: list[Candidate]
    pareto: list[Candidate]
    by_gpus: list[Candidate]
    considered: int
    fitting: int
    seconds: float


def search(
    shape: Shape,
    gpu: Gpu,
    fabric: Fabric,
    gpus: int | tuple[int, ...],
    software: Software,
    *,
    batch: int | None = None,
    batch_tokens: float | None = None,
    sequence: int | None = None,
    goal: Goal = "time",
    budget_tokens: float | None = None,
    deadline_days: float | None = None,
    memory: float | None = None,
    limits: Limits = ANYTHING,
    precision: TrainingPrecision = "bf16",
    top: int = 10,
) -> SearchResult:
    """Find the best layouts for a goal.

    `gpus` is the number of GPUs available, and fewer may be used (half, a quarter, ... for the front); a tuple lists the counts
    to choose from. `batch` is an exact number of sequences; `batch_tokens` may be missed by 5%, so that odd GPU counts divide it.

    Goals: `time` maximizes tokens per second, `cost` minimizes dollars per token. `gpus` minimizes the GPU count on which the
    model fits, or that trains on `budget_tokens` in `deadline_days`.
    """
    began = time.perf_counter()
    sequence = shape.context if sequence is None else sequence
    if (batch is None) == (batch_tokens is None):
        raise UserError("A search needs either a batch in sequences or one in tokens.", "Set exactly one of the two.")
    ranges.SEQUENCE.check("--seq", sequence)
    check_positions(shape, sequence)
    if batch_tokens is not None and batch_tokens < (1 - SLACK) * sequence:
        raise UserError(
            f"--batch-tokens {batch_tokens:g} is less than one sequence of {sequence:,} tokens.",
            f"--batch-tokens {sequence} works.",
        )
    sequences = batch if batch is not None else round((batch_tokens or 0.0) / sequence)
    ranges.BATCH.check("--batch", sequences)
    if deadline_days is not None and goal != "gpus":
        raise UserError(
            f"--deadline {deadline_days:g} is for --goal gpus, not for --goal {goal}.", "Use --goal gpus, or drop --deadline."
        )
    if deadline_days is not None and budget_tokens is None:
        raise UserError("A deadline needs a token budget.", "Set the number of tokens to train on.")
    numbers = sorted(set(gpus if isinstance(gpus, tuple) else (gpus >> halvings for halvings in range(gpus.bit_length() or 1))))
    for number in numbers:
        ranges.GPUS.check("--gpus", number)
    best_first = BestFirst(
        TimeBounds(shape, gpu, fabric, software, sequence, precision),
        MemoryBounds(shape, software, sequence, precision),
        Batch(sequences, 0.0 if batch_tokens is None else SLACK),
        numbers[-1],
        limits,
        gpu.memory if memory is None else memory,
        budget_tokens,
    )
    by_gpus = [found for number in reversed(numbers) for found in best_first.fastest(number, 1)]
    if not by_gpus:
        raise nothing_fits(best_first, numbers[-1])
    match goal:
        case "time":
            chosen = max(by_gpus, key=lambda one: one.step.tokens_per_s).gpus
        case "cost":
            chosen = min(by_gpus, key=lambda one: one.cost).gpus
        case "gpus":
            chosen = _fewest(best_first, by_gpus, deadline_days, exactly=isinstance(gpus, tuple))
    return SearchResult(
        best=best_first.fastest(chosen, top),
        pareto=front(by_gpus, lambda one: (1 / one.step.tokens_per_s, one.cost)),
        by_gpus=by_gpus,
        considered=best_first.considered,
        fitting=best_first.fitting,
        seconds=time.perf_counter() - began,
    )


def _fewest(best_first: BestFirst, by_gpus: list[Candidate], deadline_days: float | None, exactly: bool) -> int:
    """Smallest sufficient GPU count: from the listed counts (`exactly`), or by bisection to 1%, in whole NVLink domains."""
    enough = _enough(best_first, deadline_days)
    found = [one.gpus for one in by_gpus if one.step.seconds / one.layout.batch <= enough]
    if not found:
        best = min(one.days for one in by_gpus if one.days is not None)
        raise UserError(
            f"{short(best_first.budget_tokens or 0)} tokens take at least {best:,.3g} days, not --deadline {deadline_days:g}.",
            "Use more GPUs or a later deadline.",
        )
    most = min(found)
    least = most // 2  # known to be too few
    while not exactly and most - least > max(1, most // 100):
        middle = (most + least) // 2
        used = _used(best_first, middle, enough)
        most, least = (used, least) if used else (most, middle)
    domain = best_first.time_bounds.gpu.domain
    return most if exactly or most <= domain else min(*found, ceil(most / domain) * domain)


def _enough(best_first: BestFirst, deadline_days: float | None) -> float:
    """Longest allowed time in seconds per sequence."""
    if deadline_days is None or best_first.budget_tokens is None:
        return inf
    return deadline_days * 86400 / best_first.budget_tokens * best_first.time_bounds.sequence


def _used(best_first: BestFirst, gpus: int, enough: float) -> int | None:
    """GPUs used by a layout that is fast enough on at most `gpus`; None if there is none."""
    if enough == inf:
        least = smallest(best_first, gpus, best_first.limits.offloads[-1])
        return least[1].gpus if least and least[0] <= best_first.memory else None
    found = next(best_first.in_order(gpus, enough), None)
    return found.layout.gpus if found else None
