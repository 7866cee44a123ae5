"""Figures of a simulated queue: queue times, utilisation, fragmentation, compactness and lost work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strata.planner.cluster.jobs import Job, Team
from strata.planner.cluster.policies import Rules
from strata.planner.cluster.simulate import Outcome

SHORT_S = 10.0  # a shorter job counts as this long in the slowdown (bounded slowdown; Feitelson et al., 1997)


@dataclass(frozen=True)
class Waits:
    """Queue times of some jobs, in seconds: from submission to the first start. Slowdown: from submission to end, over the run
    time."""

    jobs: int
    gpu_hours: float
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    longest_s: float
    slowdown: float


@dataclass(frozen=True)
class Figures:
    """Shares are means over the time in which jobs are submitted. `fragmentation`: idle GPUs of partly used nodes over all GPUs.
    `blocks`: blocks of a gang of several nodes over the fewest possible. `at_head_s`: the longest time that a job was the first
    of its queue, which no policy lets exceed `bound_s`."""

    policy: str
    all: Waits
    teams: dict[str, Waits]
    priorities: dict[str, Waits]
    at_head_s: float
    bound_s: float
    utilisation: float
    fragmentation: float
    blocks: float
    preemptions: int
    lost_gpu_hours: float
    makespan_s: float
    refused: int


def summarise(outcome: Outcome, block: int, teams: Sequence[Team], rules: Rules) -> Figures:
    starts, ends = dict[int, float](), dict[int, float]()
    for segment in outcome.segments:
        starts[segment.job] = min(segment.start_s, starts.get(segment.job, math.inf))
        ends[segment.job] = max(segment.end_s, ends.get(segment.job, 0.0))
    by_team: dict[str, list[int]] = {}
    by_priority: dict[str, list[int]] = {}
    for number, job in enumerate(outcome.jobs):
        by_team.setdefault(job.team, []).append(number)
        by_priority.setdefault(str(job.priority), []).append(number)

    def waits(numbers: Sequence[int]) -> Waits:
        return _waits([(outcome.jobs[number], starts[number], ends[number]) for number in numbers])

    spans = [
        segment.blocks / least
        for segment in outcome.segments
        if (nodes := len(segment.allocation)) > 1 and (least := math.ceil(nodes / block))
    ]
    lost = math.fsum(segment.lost_s * outcome.jobs[segment.job].gpus for segment in outcome.segments)
    line, window = outcome.timeline, busy_window(outcome)
    return Figures(
        policy=outcome.policy.name,
        all=waits(range(len(outcome.jobs))),
        teams={team: waits(by_team[team]) for team in sorted(by_team)},
        priorities={priority: waits(by_priority[priority]) for priority in sorted(by_priority)},
        at_head_s=at_head(outcome, teams),
        bound_s=head_bound(outcome, teams, rules),
        utilisation=means(line.times, line.busy, *window, 1)[0] / outcome.gpus,
        fragmentation=means(line.times, line.stranded, *window, 1)[0] / outcome.gpus,
        blocks=math.fsum(spans) / len(spans) if spans else 1.0,
        preemptions=outcome.preemptions,
        lost_gpu_hours=lost / 3600,
        makespan_s=line.times[-1] - line.times[0] if line.times else 0.0,
        refused=len(outcome.refused),
    )


def at_head(outcome: Outcome, teams: Sequence[Team]) -> float:
    """The longest time that a job was the first of its queue. Under quotas, only jobs that fit into their team's quota count:
    others depend on what the other teams leave."""
    quotas = {team.name: team.quota for team in teams} if outcome.policy.shares else {}
    return max(
        (
            seconds
            for job, seconds in outcome.at_head.items()
            if (one := outcome.jobs[job]).gpus <= quotas.get(one.team, one.gpus)
        ),
        default=0.0,
    )


def head_bound(outcome: Outcome, teams: Sequence[Team], rules: Rules) -> float:
    """The longest time that the first job of a queue can wait. Running jobs end within the longest run time, and none that starts
    later may delay it. Under quotas it first waits for its own team's jobs, then at most once for each other team's first job,
    and after each of them again for its reservation."""
    longest = max((job.duration_s for job in outcome.jobs), default=0.0) + rules.restart_s + rules.save_s
    return longest * (2 * len(teams) + 1 if outcome.policy.shares else 1)


def busy_window(outcome: Outcome) -> tuple[float, float]:
    """The time in which jobs are submitted, or the whole simulation if all come at once."""
    if not outcome.jobs:
        return 0.0, 0.0
    first, last = outcome.jobs[0].submit_s, outcome.jobs[-1].submit_s
    return (first, last) if last > first else (first, outcome.timeline.times[-1])


def means(times: Sequence[float], values: Sequence[float], begin: float, end: float, bins: int) -> list[float]:
    """Means of a step function over equal parts of a stretch of time. `values[i]` holds from `times[i]` to the next."""
    width = (end - begin) / bins
    if width <= 0:
        return [0.0] * bins
    sums = [0.0] * bins
    for number, value in enumerate(values):
        low = max(times[number], begin)
        high = min(times[number + 1] if number + 1 < len(times) else end, end)
        while low < high:
            at = int((low - begin) / width)
            at += begin + (at + 1) * width <= low  # rounded down from an edge
            until = high if at >= bins - 1 else min(high, begin + (at + 1) * width)
            sums[min(at, bins - 1)] += value * (until - low)
            low = until
    return [total / width for total in sums]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least this share of all values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _waits(jobs: Sequence[tuple[Job, float, float]]) -> Waits:
    if not jobs:
        return Waits(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    ordered = sorted(start - job.submit_s for job, start, _ in jobs)
    slowdowns = [max(1.0, (end - job.submit_s) / max(job.duration_s, SHORT_S)) for job, _, end in jobs]
    return Waits(
        jobs=len(jobs),
        gpu_hours=math.fsum(job.gpus * job.duration_s for job, _, _ in jobs) / 3600,
        mean_s=math.fsum(ordered) / len(jobs),
        p50_s=percentile(ordered, 0.50),
        p95_s=percentile(ordered, 0.95),
        p99_s=percentile(ordered, 0.99),
        longest_s=ordered[-1],
        slowdown=math.fsum(slowdowns) / len(jobs),
    )
