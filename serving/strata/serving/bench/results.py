"""Settings and results of a benchmark run."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from strata.serving.bench import itl_attribution
from strata.serving.bench.clients import measure
from strata.serving.bench.clients.calibration import Calibration
from strata.serving.bench.clients.load import Level
from strata.serving.bench.clients.measure import Slo, Summary
from strata.serving.bench.clients.workloads import Workload
from strata.serving.bench.itl_attribution import Histograms

BUSY = 0.5  # share of the clients' capacity above which they may be the bottleneck


@dataclass(frozen=True)
class Settings:
    workload: Workload
    levels: list[Level]
    clients: int
    slo: Slo
    seed: int
    cross_check: bool
    rounds: int = 1
    side_by_side: bool = False


@dataclass(frozen=True)
class Measured:
    level: Level
    summary: Summary
    kinds: dict[str, Summary]
    client_cpu: list[float]
    gaps: Histograms = field(default_factory=dict)  # ITL counts from the server's histograms

    def doubts(self, calibration: Calibration) -> str | None:
        """The reason why the clients may be the bottleneck, if any."""
        share = self.summary.events_per_s / (calibration.events_per_s * len(self.client_cpu) / calibration.clients)
        if share > BUSY:
            return f"{share:.0%} of the clients' capacity"
        if max(self.client_cpu) > BUSY:
            return f"a client used {max(self.client_cpu):.0%} of a core"
        return None


@dataclass(frozen=True)
class Ran:
    start_s: float
    measured: list[Measured]
    cross_check: dict[str, Any] | None

    def at(self, level: Level) -> Measured | None:
        return next((one for one in self.measured if one.level == level), None)


def median(rounds: list[Ran]) -> Ran:
    """Medians over several rounds."""
    measured = []
    for number in range(max(len(ran.measured) for ran in rounds)):
        ones = [ran.measured[number] for ran in rounds if number < len(ran.measured)]  # a round may have been interrupted
        kinds = {kind: measure.median([one.kinds[kind] for one in ones]) for kind in ones[0].kinds}
        busiest = max((one.client_cpu for one in ones), key=max)
        summary, histograms = measure.median([one.summary for one in ones]), itl_attribution.merged([one.gaps for one in ones])
        measured.append(Measured(ones[0].level, summary, kinds, busiest, histograms))
    return Ran(statistics.median(ran.start_s for ran in rounds), measured, rounds[-1].cross_check)


@dataclass(frozen=True)
class Results:
    calibration: Calibration
    rounds: dict[str, dict[int, Ran]] = field(default_factory=dict)  # by number; a contender may have failed in one
    ran: dict[str, Ran] = field(default_factory=dict)  # medians of all rounds so far
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, contender: str, number: int, ran: Ran) -> None:
        self.rounds.setdefault(contender, {})[number] = ran
        self.ran[contender] = median(list(self.rounds[contender].values()))

    def at(self, contender: str, level: Level) -> Measured | None:
        found = self.ran.get(contender)
        return found.at(level) if found else None

    def pairs(self, contender: str, other: str, level: Level) -> list[tuple[Measured, Measured]]:
        """Results of both in the same rounds. The speed of a shared machine changes from round to round."""
        mine, theirs = self.rounds.get(contender, {}), self.rounds.get(other, {})
        found = [(mine[number].at(level), theirs[number].at(level)) for number in sorted(mine.keys() & theirs.keys())]
        return [(one, to) for one, to in found if one is not None and to is not None]
