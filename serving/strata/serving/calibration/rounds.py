"""Measures loads on an endpoint, in rounds: every load once in each, so that a slow minute of the machine meets all of them."""

from collections.abc import Callable, Sequence

from strata.serving.bench.clients import load
from strata.serving.bench.clients.load import Level, Target
from strata.serving.calibration import figures
from strata.serving.calibration.figures import Figures
from strata.serving.calibration.fit import Point
from strata.serving.calibration.loads import Load

SEEDS = 1000  # between two loads: no prompt repeats one of another round, which a prefix cache would have


def measure(
    target: Target, loads: Sequence[Load], rounds: int, clients: int, seed: int, progress: Callable[[str], None]
) -> list[Point]:
    """Medians over the rounds. The rate of an open loop is a share of what the closed loop reached in the same round: a machine
    that others use may be half as fast a minute later, and the same rate would then be too much for it."""
    found: dict[str, list[Figures]] = {each.name: [] for each in loads}
    levels: dict[str, list[Level]] = {each.name: [] for each in loads}
    for number in range(rounds):
        for place, each in enumerate(loads):
            rates = {name: done[-1].requests_per_s for name, done in found.items() if done}
            level = each.level(rates)
            levels[each.name].append(level)
            progress(f"round {number + 1} of {rounds}: {each.name}, {level.label}")
            outcome = load.run(target, each.workload, level, clients, seed + SEEDS * place + number)
            found[each.name].append(figures.of(outcome.records))
    return [
        Point(
            each.name,
            each.workload,
            tuple(levels[each.name]),
            tuple(seed + SEEDS * place + number for number in range(rounds)),
            tuple(found[each.name]),
            clients,
        )
        for place, each in enumerate(loads)
    ]
