"""Simulated queues against a hand-written FIFO, closed formulas of queueing theory, and small cases worked out by hand."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_audit import audit, first_starts

from strata.planner.cluster.figures import means, percentile, summarise
from strata.planner.cluster.jobs import Job, Team
from strata.planner.cluster.policies import POLICIES, Rules
from strata.planner.cluster.simulate import Outcome, simulate
from strata.planner.serving.queueing import erlang_c

RULES = Rules(save_s=10.0, restart_s=20.0, ageing_s=1000.0)


def job(name: str, gpus: int, submit: float, duration: float, team: str = "a", priority: int = 0) -> Job:
    return Job(name, team, gpus, float(submit), float(duration), priority)


def run(policy: str, jobs: list[Job], nodes: int, size: int = 1, teams: tuple[Team, ...] = (), rules: Rules = RULES) -> Outcome:
    outcome = simulate(jobs, nodes, size, POLICIES[policy], teams, 4, rules)
    audit(outcome, nodes, size, teams, rules)
    return outcome


def starts(*arguments, **options) -> dict[str, float]:
    return first_starts(run(*arguments, **options))


def fifo(jobs: list[Job], gpus: int) -> dict[str, float]:
    """First in, first out on GPUs of which any will do."""
    running: list[tuple[float, int]] = []
    found, now = {}, 0.0
    for one in sorted(jobs, key=lambda one: (one.submit_s, one.name)):
        now = max(now, one.submit_s)
        while sum(used for end, used in running if end > now) + one.gpus > gpus:
            now = min(end for end, _ in running if end > now)
        found[one.name] = now
        running.append((now + one.duration_s, one.gpus))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=30), st.integers(1, 7))
def test_fifo_equals_a_reference(rows: list[tuple[int, int, int]], gpus: int) -> None:
    jobs = [job(f"{number:02d}", min(size, gpus), submit, seconds) for number, (size, submit, seconds) in enumerate(rows)]
    assert starts("fifo", jobs, nodes=gpus) == fifo(jobs, gpus)  # nodes of one GPU
    assert starts("fifo", jobs, nodes=1, size=gpus) == fifo(jobs, gpus)  # one node


def poisson(count: int, rate: float, duration, seed: int) -> list[Job]:
    chance, now, found = random.Random(seed), 0.0, []
    for number in range(count):
        now += chance.expovariate(rate)
        found.append(job(f"{number:06d}", 1, now, duration(chance)))
    return found


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (4, 0.8)])
def test_single_gpu_jobs_wait_as_in_an_mmc_queue(servers: int, load: float) -> None:
    """The tolerances are about two deviations of such samples."""
    jobs = poisson(12_000, load * servers, lambda chance: chance.expovariate(1.0), 3)
    outcome = simulate(jobs, servers, 1, POLICIES["fifo"])
    chance = erlang_c(servers, load * servers)
    waited = sum(segment.start_s > outcome.jobs[segment.job].submit_s for segment in outcome.segments) / len(jobs)
    assert waited == pytest.approx(chance, rel=0.05)
    mean = summarise(outcome, 4, (), RULES).all.mean_s
    assert mean == pytest.approx(chance / (servers - load * servers), rel=0.15)


def test_equal_jobs_wait_as_in_an_md1_queue() -> None:
    waits = summarise(simulate(poisson(12_000, 0.5, lambda _: 1.0, 3), 1, 1, POLICIES["fifo"]), 4, (), RULES).all
    assert waits.mean_s == pytest.approx(0.5 / (2 * (1 - 0.5)), rel=0.08)


def test_backfill_takes_jobs_that_end_by_the_reserved_start_or_use_other_gpus() -> None:
    jobs = [
        job("1", 3, 0, 100),
        job("2", 4, 1, 50),  # reserved for 100, on 4 of 5 GPUs
        job("3", 1, 2, 98),  # ends at 100
        job("4", 2, 3, 500),  # does not fit now
        job("5", 1, 4, 500),  # the fifth GPU
        job("6", 1, 5, 95.5),  # would end after 100 on a GPU of the reservation
    ]
    assert starts("fifo", jobs, nodes=5) == {"1": 0, "2": 100, "3": 100, "4": 150, "5": 150, "6": 150}
    outcome = run("easy", jobs, nodes=5)
    assert first_starts(outcome) == {"1": 0, "2": 100, "3": 2, "4": 150, "5": 4, "6": 150}
    assert outcome.reserved[1] == 100


def test_a_reservation_counts_nodes_not_gpus() -> None:
    """Two half-used nodes have four free GPUs, and a gang of four needs a whole node."""
    jobs = [job("1", 3, 0, 100), job("2", 3, 0, 40), job("3", 4, 1, 10), job("4", 1, 2, 90), job("5", 1, 3, 30)]
    outcome = run("easy", jobs, nodes=2, size=4)
    assert first_starts(outcome) == {"1": 0, "2": 0, "3": 40, "4": 2, "5": 3}
    assert {outcome.jobs[each.job].name: each.allocation for each in outcome.segments}["4"] == ((0, 1),)


def test_priority_preempts_after_a_checkpoint_and_no_work_is_lost() -> None:
    jobs = [job("low", 4, 0, 100), job("high", 2, 50, 30, priority=1)]
    outcome = run("priority", jobs, nodes=4)
    assert first_starts(outcome) == {"low": 0, "high": 60}
    spans = [(outcome.jobs[each.job].name, each.start_s, each.end_s, each.useful_s) for each in outcome.segments]
    assert spans == [("low", 0, 60, 50), ("high", 60, 90, 30), ("low", 90, 160, 50)]
    assert summarise(outcome, 4, (), RULES).lost_gpu_hours == pytest.approx(4 * (10 + 20) / 3600)


def test_nothing_is_preempted_that_ends_as_soon_as_its_checkpoint_would() -> None:
    jobs = [job("low", 4, 0, 60), job("high", 2, 50, 30, priority=1)]
    outcome = run("priority", jobs, nodes=4)
    assert not outcome.preemptions and first_starts(outcome)["high"] == 60


def test_as_few_jobs_are_preempted_as_suffice() -> None:
    """Gangs of one, two and one GPU run; the one that started last does not suffice, the gang of two does."""
    jobs = [job("1", 1, 0, 500), job("2", 2, 1, 500), job("3", 1, 2, 500), job("high", 2, 10, 5, priority=1)]
    outcome = run("priority", jobs, nodes=4)
    assert outcome.preemptions == 1
    assert next(outcome.jobs[each.job].name for each in outcome.segments) == "2"


def test_a_job_that_ends_with_the_checkpoint_counts_as_free() -> None:
    jobs = [job("1", 2, 0, 60), job("2", 2, 1, 500), job("3", 2, 2, 500), job("high", 4, 50, 5, priority=1)]
    outcome = run("priority", jobs, nodes=6)
    assert outcome.preemptions == 1 and first_starts(outcome)["high"] == 60


def test_equal_priorities_do_not_preempt_each_other() -> None:
    jobs = [job("1", 4, 0, 100, priority=1), job("2", 4, 1, 5, priority=1)]
    assert run("priority", jobs, nodes=4).preemptions == 0


@pytest.mark.parametrize(("ageing", "waits"), [(200, (200, 320)), (100_000, (1900, 2100))])
def test_ageing_bounds_the_wait_of_a_low_priority(ageing: float, waits: tuple[float, float]) -> None:
    """A low priority needs the whole cluster, while high priorities keep half of it busy for 2,000 s."""
    rules = Rules(save_s=1, restart_s=1, ageing_s=ageing)
    stream = [job(f"{number:03d}", 1, 10 * number, 20, priority=1) for number in range(200)]
    low = starts("priority", [*stream, job("low", 4, 0, 50)], nodes=4, rules=rules)["low"]
    assert waits[0] <= low <= waits[1]


def test_the_turn_of_a_job_begins_again_when_a_higher_priority_goes_ahead() -> None:
    jobs = [job("1", 2, 0, 40), job("large", 4, 1, 10), job("high", 2, 30, 45, priority=1)]
    outcome = run("priority", jobs, nodes=4, rules=Rules(save_s=1, restart_s=1, ageing_s=100))
    assert first_starts(outcome) == {"1": 0, "high": 30, "large": 75}
    assert outcome.at_head == {1: 45}  # from 30 on


def test_a_large_job_does_not_starve_behind_small_ones() -> None:
    stream = [job(f"{number:03d}", 1, number, 6, team="ab"[number % 2]) for number in range(300)]
    large = job("large", 8, 5.5, 10, team="a")
    for policy in ("fifo", "easy", "topology", "fair"):
        assert starts(policy, [*stream, large], nodes=8, teams=(Team("a", 8), Team("b", 1)), rules=RULES)["large"] <= 40, policy


def test_a_team_reclaims_its_quota_from_a_borrower() -> None:
    """Two teams, three runs: the second run of a borrows, until b asks for its own quota."""
    teams = (Team("a", 4), Team("b", 4))
    jobs = [job("a1", 4, 0, 1000), job("a2", 4, 1, 1000), job("b1", 4, 100, 50, team="b")]
    outcome = run("fair", jobs, nodes=8, teams=teams)
    assert first_starts(outcome) == {"a1": 0, "a2": 1, "b1": 110}
    assert outcome.preemptions == 1
    spans = [(outcome.jobs[each.job].name, each.start_s, each.end_s) for each in outcome.segments]
    assert spans == [("a2", 1, 110), ("b1", 110, 160), ("a1", 0, 1000), ("a2", 160, 160 + 20 + 901)]


def test_reclaim_stops_at_the_quota_of_the_borrower() -> None:
    """b's second job exceeds b's quota, so it waits, although a runs younger jobs within its own."""
    teams = (Team("a", 4), Team("b", 4))
    jobs = [job("b1", 4, 0, 300, team="b"), job("a1", 4, 1, 300), job("b2", 2, 2, 10, team="b")]
    outcome = run("fair", jobs, nodes=8, teams=teams)
    assert not outcome.preemptions and first_starts(outcome)["b2"] == 300


def test_a_borrowing_limit_holds_while_gpus_are_idle() -> None:
    teams = (Team("a", 4, 2), Team("b", 4))
    jobs = [job("a1", 4, 0, 100), job("a2", 2, 1, 100), job("a3", 1, 2, 100)]
    assert starts("fair", jobs, nodes=8, teams=teams) == {"a1": 0, "a2": 1, "a3": 100}


def test_gpus_beyond_all_quotas_stay_idle() -> None:
    jobs = [job("a1", 4, 0, 100), job("a2", 1, 1, 100)]
    assert starts("fair", jobs, nodes=8, teams=(Team("a", 4),)) == {"a1": 0, "a2": 100}


def test_a_reservation_counts_the_cohort_too() -> None:
    """GPUs are idle beyond the quotas. b waits for c's first job; of c's others only one fits beside it."""
    teams = (Team("a", 4), Team("b", 4), Team("c", 5))
    jobs = [job("a1", 4, 0, 1000), job("a2", 4, 0, 1000), job("c1", 2, 0, 103, team="c"), job("b1", 4, 100, 10, team="b")]
    late = [job("c2", 1, 101, 500, team="c"), job("c3", 1, 102, 500, team="c")]
    found = starts("fair", [*jobs, *late], nodes=20, teams=teams)
    assert (found["b1"], found["c2"], found["c3"]) == (103, 101, 113)


def test_the_team_with_the_smaller_share_borrows_first() -> None:
    """c's quota is free. Both a and b are at their quotas and ask for a loan at the same moment."""
    teams = (Team("a", 2), Team("b", 4), Team("c", 2))
    jobs = [job("a1", 2, 0, 500), job("b1", 4, 0, 500, team="b"), job("c1", 2, 0, 50, team="c")]
    wants = [job("a2", 2, 10, 5), job("b2", 2, 10, 5, team="b")]
    found = starts("fair", [*jobs, *wants], nodes=8, teams=teams)
    assert (found["b2"], found["a2"]) == (50, 55)


def test_a_backlog_of_one_team_does_not_delay_another() -> None:
    """a has submitted 40 jobs before b's first, and b starts as if a had none."""
    teams = (Team("a", 4), Team("b", 4))
    jobs = [job(f"a{number:02d}", 1, 0, 100) for number in range(40)] + [job("b", 4, 50, 10, team="b")]
    assert starts("fair", jobs, nodes=8, teams=teams)["b"] == 50 + RULES.save_s
    assert starts("easy", jobs, nodes=8)["b"] > 400


def test_figures_of_a_small_queue() -> None:
    jobs = [job("1", 2, 0, 100), job("2", 2, 0, 100, team="b", priority=1), job("3", 1, 100, 50)]
    figures = summarise(run("fifo", jobs, nodes=1, size=2), 4, (), RULES)
    assert (figures.all.mean_s, figures.all.p50_s, figures.all.p95_s, figures.all.longest_s) == (200 / 3, 100, 100, 100)
    assert figures.all.slowdown == pytest.approx((1 + 2 + 3) / 3)
    assert (figures.teams["a"].mean_s, figures.teams["b"].mean_s) == (50, 100)
    assert (figures.priorities["0"].jobs, figures.priorities["1"].mean_s) == (2, 100)
    assert figures.all.gpu_hours == pytest.approx(450 / 3600)
    assert (figures.utilisation, figures.makespan_s) == (1.0, 250)  # while jobs are submitted: 0 to 100
    assert figures.at_head_s == 100 and math.isclose(figures.bound_s, 130)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.integers(1, 40), st.floats(0.1, 50), st.floats(0.1, 60))
def test_means_over_parts_of_time(times: list[float], bins: int, begin: float, length: float) -> None:
    """They average to the mean over the whole time, and a value that never changes stays the same in every part."""
    times = sorted({0.0, *times})
    values = [float(number % 7) for number in range(len(times))]
    found = means(times, values, begin, begin + length, bins)
    assert sum(found) / bins == pytest.approx(means(times, values, begin, begin + length, 1)[0])
    assert max(found) <= 6 + 1e-9
    assert means(times, [3.0] * len(times), begin, begin + length, bins) == pytest.approx([3.0] * bins)


def test_means_of_a_step() -> None:
    assert means([0, 10, 30], [1, 2, 5], 5, 45, 4) == pytest.approx([1.5, 2, 3.5, 5])
    assert means([0, 10], [1, 2], 5, 5, 3) == [0, 0, 0]
    # Edges that floats do not hit: a third of 0.1 is not a multiple of itself.
    edges = [number * 0.1 / 3 for number in range(30)]
    assert means(edges, [float(number) for number in range(30)], 0, 1.0, 30) == pytest.approx(range(30))


def test_percentiles_are_nearest_ranks() -> None:
    ordered = [float(number) for number in range(1, 101)]
    assert [percentile(ordered, share) for share in (0, 0.5, 0.95, 0.99, 1)] == [1, 50, 95, 99, 100]
    assert percentile([7.0], 0.99) == 7 and percentile([1.0, 2.0, 3.0], 0.5) == 2
