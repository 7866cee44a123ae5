"""The best layouts for a goal: the least time, the least money or the fewest GPUs."""

import time
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from strata.planner import ranges
from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.checks import check_positions
from strata.planner.layout import TrainingPrecision
from strata.planner.search.best_first import Candidate, Hunt
from strata.planner.search.memory_bounds import Room
from strata.planner.search.no_fit import leanest, nothing_fits
from strata.planner.search.pareto import front
from strata.planner.search.space import ANYTHING, SLACK, Batch, Limits
from strata.planner.search.time_bounds import Desk
from strata.planner.units import short
from strata.platform.errors import UserError
from strata.platform.hardware.specs import Fabric, Gpu

Goal = Literal["time", "cost", "gpus"]


@dataclass(frozen=True)
class SearchResult:
    """`by_gpus` has the quickest layout for each number of GPUs that was looked at, `pareto` those of them to which no other is
    both quicker and cheaper. `considered` layouts were looked at one by one, of which `fitting` fit; of all others it was seen,
    many at once, that they would not fit or be quick enough."""

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
    """`gpus`: how many there are, of which fewer may be used (half, a quarter, ... for the front), or the numbers to choose from.
    `batch` is in sequences and exact; one in `batch_tokens` may be missed by 5%, so that odd numbers of GPUs divide it.

    time: the most tokens a second. cost: the fewest dollars a token. gpus: the fewest GPUs on which the model fits, or that
    train on `budget_tokens` in `deadline_days`.
    """
    began = time.perf_counter()
    sequence = shape.context if sequence is None else sequence
    if (batch is None) == (batch_tokens is None):
        raise UserError("A search needs a batch, in sequences or in tokens.", "Give one of the two.")
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
            f"--deadline {deadline_days:g} is for --goal gpus, not for --goal {goal}.", "Give --goal gpus, or no deadline."
        )
    if deadline_days is not None and budget_tokens is None:
        raise UserError("A deadline needs a number of tokens.", "Say how many tokens are to be trained on.")
    numbers = sorted(set(gpus if isinstance(gpus, tuple) else (gpus >> halvings for halvings in range(gpus.bit_length() or 1))))
    for number in numbers:
        ranges.GPUS.check("--gpus", number)
    hunt = Hunt(
        Desk(shape, gpu, fabric, software, sequence, precision),
        Room(shape, software, sequence, precision),
        Batch(sequences, 0.0 if batch_tokens is None else SLACK),
        numbers[-1],
        limits,
        gpu.memory if memory is None else memory,
        budget_tokens,
    )
    by_gpus = [found for number in reversed(numbers) for found in hunt.quickest(number, 1)]
    if not by_gpus:
        raise nothing_fits(hunt, numbers[-1])
    match goal:
        case "time":
            chosen = max(by_gpus, key=lambda one: one.step.tokens_per_s).gpus
        case "cost":
            chosen = min(by_gpus, key=lambda one: one.cost).gpus
        case "gpus":
            chosen = _fewest(hunt, by_gpus, deadline_days, exactly=isinstance(gpus, tuple))
    return SearchResult(
        best=hunt.quickest(chosen, top),
        pareto=front(by_gpus, lambda one: (1 / one.step.tokens_per_s, one.cost)),
        by_gpus=by_gpus,
        considered=hunt.considered,
        fitting=hunt.fitting,
        seconds=time.perf_counter() - began,
    )


def _fewest(hunt: Hunt, by_gpus: list[Candidate], deadline_days: float | None, exactly: bool) -> int:
    """Of GPUs that are enough: of the numbers that were looked at (`exactly`), or to 1% between them, in whole NVLink domains."""
    enough = _enough(hunt, deadline_days)
    found = [one.gpus for one in by_gpus if one.step.seconds / one.layout.batch <= enough]
    if not found:
        best = min(one.days for one in by_gpus if one.days is not None)
        raise UserError(
            f"{short(hunt.budget_tokens or 0)} tokens take {best:,.3g} days at best, not {deadline_days:g}.",
            "Give more GPUs or more days.",
        )
    most = min(found)
    least = most // 2  # which was not enough
    while not exactly and most - least > max(1, most // 100):
        middle = (most + least) // 2
        used = _used(hunt, middle, enough)
        most, least = (used, least) if used else (most, middle)
    domain = hunt.desk.gpu.domain
    return most if exactly or most <= domain else min(*found, ceil(most / domain) * domain)


def _enough(hunt: Hunt, deadline_days: float | None) -> float:
    """Seconds that a sequence may take."""
    if deadline_days is None or hunt.budget_tokens is None:
        return inf
    return deadline_days * 86400 / hunt.budget_tokens * hunt.desk.sequence


def _used(hunt: Hunt, gpus: int, enough: float) -> int | None:
    """Of so many GPUs, those of a layout that is quick enough; None if there is none."""
    if enough == inf:
        lean = leanest(hunt, gpus, hunt.limits.offloads[-1])
        return lean[1].gpus if lean and lean[0] <= hunt.memory else None
    found = next(hunt.best_first(gpus, enough), None)
    return found.layout.gpus if found else None
