"""Properties of every simulated queue: gangs, quotas, reservations, conserved work, no starvation, order of the file."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_audit import audit, first_starts

from strata.planner.cluster.figures import at_head, head_bound, summarise
from strata.planner.cluster.jobs import Job, Team, generate
from strata.planner.cluster.policies import POLICIES, Rules
from strata.planner.cluster.simulate import simulate

NODES, SIZE, BLOCK = 6, 4, 2
TEAMS = (Team("a", 12), Team("b", 8, 4), Team("c", 4, 0))
RULES = Rules(save_s=3.0, restart_s=5.0, ageing_s=40.0)

jobs = st.builds(
    Job,
    name=st.text("abcdefgh", min_size=1, max_size=3),
    team=st.sampled_from("abc"),
    gpus=st.integers(1, NODES * SIZE + 2),
    submit_s=st.integers(0, 60).map(float),
    duration_s=st.integers(1, 50).map(float),
    priority=st.integers(0, 2),
)
traces = st.lists(jobs, min_size=1, max_size=25)
policies = st.sampled_from(list(POLICIES.values()))


@settings(max_examples=100, deadline=None)
@given(traces, policies)
def test_gangs_are_whole_no_gpu_is_used_twice_quotas_add_up_and_work_is_conserved(trace: list[Job], policy) -> None:
    audit(simulate(trace, NODES, SIZE, policy, TEAMS, BLOCK, RULES), NODES, SIZE, TEAMS, RULES)


@settings(max_examples=40, deadline=None)
@given(traces, st.sampled_from(["priority", "fair"]))
def test_preemption_at_no_cost_loses_nothing(trace: list[Job], name: str) -> None:
    """A preempted job may go on at once on other nodes."""
    rules = Rules(save_s=0.0, restart_s=0.0, ageing_s=40.0)
    audit(simulate(trace, NODES, SIZE, POLICIES[name], TEAMS, BLOCK, rules), NODES, SIZE, TEAMS, rules)


@settings(max_examples=60, deadline=None)
@given(traces, st.sampled_from(["easy", "topology"]))
def test_backfill_does_not_delay_a_reserved_start(trace: list[Job], name: str) -> None:
    outcome = simulate(trace, NODES, SIZE, POLICIES[name], TEAMS, BLOCK, RULES)
    starts = {segment.job: segment.start_s for segment in outcome.segments}
    for job, reserved in outcome.reserved.items():
        assert outcome.jobs[job].submit_s <= starts[job] <= reserved


@settings(max_examples=100, deadline=None)
@given(traces, policies)
def test_the_first_job_of_a_queue_starts_within_the_bound(trace: list[Job], policy) -> None:
    outcome = simulate(trace, NODES, SIZE, policy, TEAMS, BLOCK, RULES)
    assert at_head(outcome, TEAMS) <= head_bound(outcome, TEAMS, RULES)


@settings(max_examples=40, deadline=None)
@given(traces, policies, st.randoms(use_true_random=False))
def test_the_order_of_jobs_in_a_file_does_not_count(trace: list[Job], policy, chance: random.Random) -> None:
    shuffled = list(trace)
    chance.shuffle(shuffled)
    ran, again = (simulate(one, NODES, SIZE, policy, TEAMS, BLOCK, RULES) for one in (trace, shuffled))
    assert (ran.jobs, ran.refused, ran.segments, ran.timeline) == (again.jobs, again.refused, again.segments, again.timeline)


@settings(max_examples=40, deadline=None)
@given(traces)
def test_only_jobs_that_can_never_run_are_refused(trace: list[Job]) -> None:
    assert {job.gpus > 24 for job in simulate(trace, NODES, SIZE, POLICIES["easy"]).refused} <= {True}
    most = {"a": 24, "b": 12, "c": 4}
    outcome = simulate(trace, NODES, SIZE, POLICIES["fair"], TEAMS, BLOCK, RULES)
    assert sorted(job.name for job in outcome.refused) == sorted(job.name for job in trace if job.gpus > most[job.team])


@pytest.mark.parametrize("seed", range(2))
def test_a_generated_trace_passes_the_audit_under_every_policy(seed: int) -> None:
    teams = [Team("a", 128), Team("b", 96, 32), Team("c", 32, 0)]
    trace = generate(256, 300, 1.1, {"a": 1, "b": 3, "c": 1}, seed)
    for policy in POLICIES.values():
        outcome = simulate(trace, 32, 8, policy, teams, 4)
        audit(outcome, 32, 8, teams, Rules())
        figures = summarise(outcome, 4, teams, Rules())
        assert 0 < figures.utilisation <= 1 and 0 <= figures.fragmentation < 1 and figures.blocks >= 1
        assert figures.at_head_s <= figures.bound_s


@settings(max_examples=20, deadline=None)
@given(traces)
def test_backfill_and_preemption_change_nothing_on_a_cluster_that_is_large_enough(trace: list[Job]) -> None:
    teams = [Team(name, 25 * 26) for name in "abc"]
    for policy in POLICIES.values():
        outcome = simulate(trace, 25 * 26, 1, policy, teams, 32, RULES)
        assert all(segment.start_s == outcome.jobs[segment.job].submit_s for segment in outcome.segments)
        assert not outcome.preemptions


def test_policies_without_quotas_ignore_teams() -> None:
    trace = generate(64, 150, 1.0, {"a": 1, "b": 1}, 5)
    alone = [replace(job, team="a") for job in trace]
    for name in ("fifo", "easy", "topology", "priority"):
        starts = [first_starts(simulate(each, 8, 8, POLICIES[name])) for each in (trace, alone)]
        assert starts[0] == starts[1]
