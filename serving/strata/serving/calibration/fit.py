"""Parameters of a simulated endpoint with which it has the figures of a measured one.

The simulation itself is fitted, by Levenberg-Marquardt over the logarithms of the parameters. It has queues in the front end,
prompts that delay streams, and batches that fill up, for which there is no formula. The residuals are logarithms of simulated
over measured figures. A parameter that no load depends on stays at its first guess, to which a weak prior holds it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from strata.serving.bench.clients.load import Level
from strata.serving.bench.clients.workloads import Workload
from strata.serving.calibration.figures import Figures, median
from strata.serving.calibration.replay import Engines, simulate
from strata.serving.simulation.calibration import Calibration

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]

STEPS = ("fixed_s", "sequence_s", "context_token_s", "prompt_step_s", "prompt_token_s", "prompt_pair_s")
HOST = ("host_s", "host_sequence_s")
# Without asynchronous scheduling, engine, front end and clients share the cores of a CPU.
SAME_CORES = ("prompt_s", "prompt_beside_s", "request_spread")
FRONT = ("request_s", "front_request_s", "front_token_s")
TRANSFER = ("handoff_s", "transfer_token_s")
# Weights of the figures: those with a bar count most; the tail of a few dozen requests is noisy.
WEIGHTS = {"requests_per_s": 0.0, "tokens_per_s": 2.0, "ttft_p50": 2.0, "ttft_p90": 0.5, "itl_p50": 0.5, "itl_mean": 1.0}
ENGINE_SHARES = (0.8, 0.5, 0.2)
PRIOR = 0.02
ITERATIONS = 8
SCATTERED, SPREAD = 40, 0.4  # first places of a search, and the standard deviation of their logarithms
DIFFERENCE = 0.05  # of a logarithm, for the derivatives; smaller ones see single events of the simulation
MOST_CHANGE = 1.0  # of a logarithm in one iteration
NOTHING: Mapping[str, float] = MappingProxyType({})
ENOUGH = 0.002  # relative improvement below which the search ends


@dataclass(frozen=True)
class Point:
    """A measured load."""

    name: str
    workload: Workload
    levels: tuple[Level, ...]  # of the rounds: the rates of an open loop may differ
    seeds: tuple[int, ...]  # of the rounds
    rounds: tuple[Figures, ...]  # a record has their medians alone
    clients: int = 1  # processes that sent it

    @cached_property
    def figures(self) -> Figures:
        return median(self.rounds)

    @property
    def level(self) -> Level:
        return self.levels[0]

    def simulated(self, calibration: Calibration, engines: Engines) -> Figures:
        alike = self.workload.name == "uniform" and self.level.concurrency  # the rounds differ in their tokens alone
        rounds = list(zip(self.levels, self.seeds, strict=True))[: 1 if alike else None]
        return median([simulate(calibration, engines, self.workload, level, seed, self.clients) for level, seed in rounds])


def guesses(
    points: Sequence[Point], kv_tokens: int, context: int, engines: Engines, known: Mapping[str, float] = NOTHING
) -> list[Calibration]:
    """First parameters, by the loads with the fewest and the most streams. The time per stream, and the time to a first token
    that no prompt token explains, are the engine's or the front end's: there is a guess for either, and one between them.
    `known` parameters are given, and not fitted."""
    calm = min(points, key=lambda point: (point.level.concurrency or math.inf, point.workload.input))
    calm_long = min(points, key=lambda point: (point.level.concurrency or math.inf, -point.workload.input))
    full = max(points, key=lambda point: point.level.concurrency or 0)
    itl, ttft = calm.figures.itl_mean, calm.figures.ttft_p50
    sequence_s = max((full.figures.itl_mean - itl) / max(1, (full.level.concurrency or 1) - 1), itl / 200)
    more_tokens = calm_long.workload.input - calm.workload.input
    slope = (calm_long.figures.ttft_p50 - ttft) / more_tokens if more_tokens > 0 else 0.0
    token_s = max(slope, (ttft - itl) / 5 / calm.workload.input, ttft / 100 / calm.workload.input)
    rest = max(ttft - itl - token_s * calm.workload.input, ttft / 10)
    return [
        Calibration(
            fixed_s=0.9 * itl,
            context_token_s=known.get("context_token_s", itl / 1e5),
            prompt_step_s=engine * rest * (1.0 if engines.async_scheduling else 0.5),
            prompt_s=0.0 if engines.async_scheduling else engine * rest * 0.5,
            prompt_beside_s=0.0 if engines.async_scheduling else engine * rest * 0.25,
            prompt_token_s=0.9 * token_s,
            prompt_pair_s=known.get("prompt_pair_s", token_s / 1e4),
            request_s=0.75 * (1 - engine) * rest,
            request_spread=0.0 if engines.async_scheduling else known.get("request_spread", SPREAD),
            front_request_s=0.25 * (1 - engine) * rest,
            front_token_s=(1 - engine) * full.figures.itl_mean / (full.level.concurrency or 1),
            kv_tokens=kv_tokens,
            context=context,
            handoff_s=rest / 2 if engines.prefill else 0.0,
            transfer_token_s=token_s / 10 if engines.prefill else 0.0,
            block_size=engines.block_size,
            max_sequences=engines.max_sequences,
            step_tokens=engines.step_tokens,
            async_scheduling=engines.async_scheduling,
            graph_tokens=engines.graph_tokens,
            **_per_sequence(engines, known, itl, engine * sequence_s),
        )
        for engine in ENGINE_SHARES
    ]


def _per_sequence(engines: Engines, known: Mapping[str, float], itl: float, seconds: float) -> dict[str, float]:
    """The host's time per sequence is beside the accelerator's with asynchronous scheduling, and a part of it without."""
    if not engines.async_scheduling:
        return {"sequence_s": known.get("sequence_s", seconds)}
    return {"sequence_s": known.get("sequence_s", seconds / 10), "host_s": 0.75 * itl, "host_sequence_s": seconds}


def fit(
    starts: Sequence[Calibration],
    engines: Engines,
    points: Sequence[Point],
    progress: Callable[[str], None],
    known: Collection[str] = (),
) -> Calibration:
    """The best of the fits from each start. Parameters with `known` names stay as they are."""
    names = STEPS + (HOST if engines.async_scheduling else SAME_CORES) + FRONT + (TRANSFER if engines.prefill else ())
    fitted = [name for name in names if name not in known]
    found = [_fit(start, fitted, engines, points, progress) for start in starts]
    return min(found, key=lambda each: each[0])[1]


def _fit(
    first: Calibration, names: Sequence[str], engines: Engines, points: Sequence[Point], progress: Callable[[str], None]
) -> tuple[float, Calibration]:
    start: Vector = np.log([getattr(first, name) for name in names])

    def calibration(place: Vector) -> Calibration:
        return first.model_copy(update=dict(zip(names, np.exp(place).tolist(), strict=True)))

    def residuals(place: Vector) -> Vector:
        found = calibration(place)
        simulated = [point.simulated(found, engines) for point in points]
        errors = [error for point, each in zip(points, simulated, strict=True) for error in _errors(point.figures, each)]
        return np.concatenate([errors, PRIOR * (place - start)])

    # The figures of a closed loop jump where requests change steps, so a search from one place ends in the next hollow.
    spread = np.random.default_rng(0).normal(0.0, SPREAD, (SCATTERED, len(names)))
    tried = [(found, place) for place in (start, *(start + spread)) for found in (residuals(place),)]
    now, place = min(tried, key=lambda each: float(each[0] @ each[0]))
    damping = 0.1
    for iteration in range(ITERATIONS):
        progress(f"iteration {iteration + 1} of at most {ITERATIONS}, mean error {_mean_error(now, len(points)):.1%}")
        slopes = np.stack([(residuals(place + DIFFERENCE * unit) - now) / DIFFERENCE for unit in np.eye(len(names))], axis=1)
        before = float(now @ now)
        for _ in range(6):
            normal = slopes.T @ slopes
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slopes.T @ now)
            next_place = place + np.clip(change, -MOST_CHANGE, MOST_CHANGE)
            after = residuals(next_place)
            if after @ after < before:
                place, now, damping = next_place, after, damping / 4
                break
            damping *= 4
        if float(now @ now) > before * (1 - ENOUGH):
            break
    return float(now @ now), calibration(place)


def errors(measured: Figures, simulated: Figures) -> Mapping[str, float]:
    """Simulated over measured figures, less 1."""
    found = {}
    for name in WEIGHTS:
        one, other = getattr(measured, name), getattr(simulated, name)
        if one and other and math.isfinite(other):
            found[name] = other / one - 1
    return found


def _errors(measured: Figures, simulated: Figures) -> list[float]:
    found = errors(measured, simulated)
    return [weight * math.log1p(found[name]) if name in found else 0.0 for name, weight in WEIGHTS.items()]


def _mean_error(residuals: Vector, points: int) -> float:
    """Mean of the weighted errors, as a share."""
    weights = points * sum(weight**2 for weight in WEIGHTS.values())
    count = points * len(WEIGHTS)
    return math.sqrt(float(residuals[:count] @ residuals[:count]) / weights)
