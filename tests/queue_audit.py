"""Checks of a simulated queue that hold for every trace and every policy, made from its segments alone."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest

from strata.planner.cluster.jobs import Team
from strata.planner.cluster.policies import Rules
from strata.planner.cluster.simulate import Outcome, Segment


def audit(outcome: Outcome, nodes: int, size: int, teams: Sequence[Team], rules: Rules) -> None:
    whole_gangs(outcome, size)
    no_gpu_twice(outcome, nodes, size)
    work_is_conserved(outcome, rules)
    if outcome.policy.shares:
        quotas_add_up(outcome, teams)
    assert outcome.timeline.busy[-1:] in ([], [0]) and outcome.timeline.waiting[-1:] in ([], [0])


def whole_gangs(outcome: Outcome, size: int) -> None:
    for segment in outcome.segments:
        job = outcome.jobs[segment.job]
        taken = [gpus for _, gpus in segment.allocation]
        assert sum(taken) == job.gpus
        assert len({node for node, _ in segment.allocation}) == math.ceil(job.gpus / size)
        assert sorted(taken, reverse=True)[: job.gpus // size] == [size] * (job.gpus // size)
        assert segment.start_s >= job.submit_s


def no_gpu_twice(outcome: Outcome, nodes: int, size: int) -> None:
    used: Counter[int] = Counter()
    for _, starts, segment in moments(outcome.segments):
        for node, gpus in segment.allocation:
            assert 0 <= node < nodes
            used[node] += gpus if starts else -gpus
            assert 0 <= used[node] <= size


def quotas_add_up(outcome: Outcome, teams: Sequence[Team]) -> None:
    quotas = {team.name: team for team in teams}
    used: Counter[str] = Counter()
    for _, starts, segment in moments(outcome.segments):
        job = outcome.jobs[segment.job]
        used[job.team] += job.gpus if starts else -job.gpus
        assert used[job.team] <= quotas[job.team].most
        borrowed = sum(max(0, used[name] - team.quota) for name, team in quotas.items())
        own = sum(min(used[name], team.quota) for name, team in quotas.items())
        assert own + borrowed == used.total() <= sum(team.quota for team in teams)


def work_is_conserved(outcome: Outcome, rules: Rules) -> None:
    by_job: dict[int, list[Segment]] = {}
    for segment in sorted(outcome.segments, key=lambda segment: segment.start_s):
        by_job.setdefault(segment.job, []).append(segment)
    assert by_job.keys() == set(range(len(outcome.jobs))), "every job ends"
    assert outcome.preemptions == len(outcome.segments) - len(outcome.jobs)
    for job, segments in by_job.items():
        assert sum(segment.useful_s for segment in segments) == pytest.approx(outcome.jobs[job].duration_s)
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(segments))
        for segment in segments:
            assert segment.end_s - segment.start_s == pytest.approx(segment.useful_s + segment.lost_s)
        # A preempted job loses its checkpoint and its restart, and nothing else.
        assert segments[0].lost_s == pytest.approx(rules.save_s if len(segments) > 1 else 0.0)
        for segment in segments[1:-1]:
            assert rules.save_s <= segment.lost_s + 1e-6 and segment.lost_s <= rules.save_s + rules.restart_s + 1e-6
        if len(segments) > 1:
            assert segments[-1].lost_s == pytest.approx(rules.restart_s)


def moments(segments: Sequence[Segment]) -> list[tuple[float, bool, Segment]]:
    """Ends and starts in order of time; at the same time ends come first. A job that is preempted as it starts holds nothing."""
    segments = [segment for segment in segments if segment.end_s > segment.start_s]
    found = [(segment.end_s, False, segment) for segment in segments] + [(segment.start_s, True, segment) for segment in segments]
    return sorted(found, key=lambda moment: (moment[0], moment[1]))


def first_starts(outcome: Outcome) -> dict[str, float]:
    starts: dict[str, float] = {}
    for segment in outcome.segments:
        name = outcome.jobs[segment.job].name
        starts[name] = min(segment.start_s, starts.get(name, math.inf))
    return starts
