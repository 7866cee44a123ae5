"""Discrete-event simulation of a queue of gangs on a cluster.

Time moves from one event to the next: a submission, the end of a job, or the end of a preempted job's checkpoint. All events of
one moment happen before the scheduler runs. Durations are known exactly, so the reserved start of the job that waits longest
holds: jobs that overtake it either end by then or use other nodes.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from strata.planner.cluster.jobs import Job, Team, in_order
from strata.planner.cluster.nodes import ANY, OPEN, RESERVED, Allocation, Nodes, Pools, fits
from strata.planner.cluster.policies import Policy, Rules
from strata.planner.cluster.quotas import Cohort

# Nodes to try in turn. A job that ends by the reserved start takes reserved nodes first, and leaves the others to longer jobs.
FIRST = (ANY,)
SHORT = (RESERVED, ANY)
LONG = (OPEN,)


@dataclass(frozen=True)
class Segment:
    """A stretch of time in which a job holds its GPUs. `useful_s` is its progress, `lost_s` restart and checkpoint."""

    job: int
    start_s: float
    end_s: float
    useful_s: float
    lost_s: float
    allocation: Allocation
    blocks: int


@dataclass
class Timeline:
    """State of the cluster after each event."""

    times: list[float] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)  # GPUs
    stranded: list[int] = field(default_factory=list)  # free GPUs of nodes that are partly used
    waiting: list[int] = field(default_factory=list)  # jobs


@dataclass(frozen=True)
class Outcome:
    """`jobs` are those that ran, in order of submission; `refused` ask for more than they can ever get. `reserved` has the first
    reserved start of each job that had one, `at_head` the time that a job waited as the first of its queue."""

    policy: Policy
    gpus: int
    jobs: list[Job]
    refused: list[Job]
    segments: list[Segment]
    reserved: dict[int, float]
    at_head: dict[int, float]
    preemptions: int
    timeline: Timeline


@dataclass
class _Running:
    start_s: float
    end_s: float
    allocation: Allocation
    overhead_s: float  # of a restart, before the first progress
    useful_s: float | None = None  # set when it is preempted: progress up to then


@dataclass
class _Reservation:
    job: int
    time_s: float
    nodes: list[int]
    spare: float  # GPUs of the cohort that jobs may still use beyond `time_s`


def simulate(
    jobs: Sequence[Job],
    nodes: int,
    gpus_per_node: int,
    policy: Policy,
    teams: Sequence[Team] = (),
    block: int = 32,
    rules: Rules | None = None,
) -> Outcome:
    """`block`: nodes per block. `teams` are needed for policies with quotas only."""
    return _Simulation(jobs, Nodes(nodes, gpus_per_node, block, policy.compact), policy, teams, rules or Rules()).run()


class _Simulation:
    def __init__(self, jobs: Sequence[Job], nodes: Nodes, policy: Policy, teams: Sequence[Team], rules: Rules) -> None:
        self.nodes, self.policy, self.rules = nodes, policy, rules
        self.gpus = nodes.idle
        self.cohort = Cohort(teams) if policy.shares else None
        possible = [job.gpus <= self.gpus and (not self.cohort or self.cohort.can_ever(job.team, job.gpus)) for job in jobs]
        self.jobs = in_order([job for job, fine in zip(jobs, possible, strict=True) if fine])
        self.refused = in_order([job for job, fine in zip(jobs, possible, strict=True) if not fine])
        ageing = rules.ageing_s if policy.preempts else 0.0
        # With ageing, the order of two waiting jobs never changes: a priority is worth a fixed time in the queue.
        self.keys = [(job.submit_s - job.priority * ageing, number) for number, job in enumerate(self.jobs)]
        self.lowest = min((job.priority for job in self.jobs), default=0)
        self.sized = [job.gpus for job in self.jobs]
        self.left = [job.duration_s for job in self.jobs]  # seconds of progress
        self.needs = self.left.copy()  # seconds from the next start to the end, with a restart
        self.queues: dict[str, list[tuple[float, int]]] = {}
        self.sizes: Counter[int] = Counter()  # of waiting jobs
        self.running: dict[int, _Running] = {}
        self.ends: list[tuple[float, int]] = []  # also of jobs that were preempted since; `_current` tells
        self.reservation: _Reservation | None = None
        self.now = 0.0
        self.segments: list[Segment] = []
        self.reserved: dict[int, float] = {}
        self.since: dict[int, float] = {}  # when a waiting job became the first of its queue
        self.at_head: dict[int, float] = {}
        self.preemptions = 0
        self.timeline = Timeline()

    def run(self) -> Outcome:
        arrived = 0
        while arrived < len(self.jobs) or self.running:
            while self.ends and not self._current(self.ends[0]):
                heappop(self.ends)
            submitted = self.jobs[arrived].submit_s if arrived < len(self.jobs) else inf
            self.now = min(submitted, self.ends[0][0] if self.ends else inf)
            while self.ends and self.ends[0][0] <= self.now:
                if self._current(end := heappop(self.ends)):
                    self._end(end[1])
            while arrived < len(self.jobs) and self.jobs[arrived].submit_s <= self.now:
                self._wait(arrived)
                arrived += 1
            (self._schedule_teams if self.cohort else self._schedule_queue)()
            self._record()
        assert not self.sizes.total(), "a job that can run waits in an empty cluster"
        return Outcome(
            policy=self.policy,
            gpus=self.gpus,
            jobs=self.jobs,
            refused=self.refused,
            segments=self.segments,
            reserved=self.reserved,
            at_head=self.at_head,
            preemptions=self.preemptions,
            timeline=self.timeline,
        )

    def _current(self, end: tuple[float, int]) -> bool:
        return end[1] in self.running and self.running[end[1]].end_s == end[0]

    def _record(self) -> None:
        line = self.timeline
        line.times.append(self.now)
        line.busy.append(self.gpus - self.nodes.idle)
        line.stranded.append(self.nodes.stranded)
        line.waiting.append(self.sizes.total())

    # Jobs.

    def _wait(self, job: int) -> None:
        insort(self.queues.setdefault(self.jobs[job].team if self.cohort else "", []), self.keys[job])
        self.sizes[self.jobs[job].gpus] += 1

    def _start(self, job: int, queue: list[tuple[float, int]], position: int, tries: Iterable[Pools]) -> bool:
        """Start a waiting job if its whole gang fits."""
        one = self.jobs[job]
        allocation = next((found for pools in tries if (found := self.nodes.place(one.gpus, pools))), None)
        if allocation is None:
            return False
        del queue[position]
        self.sizes[one.gpus] -= 1
        if not self.sizes[one.gpus]:
            del self.sizes[one.gpus]
        restart = self.rules.restart_s if self.needs[job] > self.left[job] else 0.0
        self.running[job] = _Running(self.now, self.now + self.needs[job], allocation, restart)
        heappush(self.ends, (self.running[job].end_s, job))
        if self.cohort:
            self.cohort.take(one.team, one.gpus)
        if self.reservation and self.reservation.job == job:
            self._cancel()
        if job in self.since:
            self.at_head[job] = max(self.at_head.get(job, 0.0), self.now - self.since.pop(job))
        return True

    def _end(self, job: int) -> None:
        """Release the GPUs of a job that is done, or has written the checkpoint before its preemption."""
        held, one = self.running.pop(job), self.jobs[job]
        self.nodes.release(held.allocation)
        if self.cohort:
            self.cohort.give_back(one.team, one.gpus)
        useful, lost = self.left[job], held.overhead_s
        if held.useful_s is not None:
            useful, lost = held.useful_s, held.end_s - held.start_s - held.useful_s
            self.left[job] -= useful
            self.needs[job] = self.left[job] + self.rules.restart_s
            self._wait(job)
        blocks = self.nodes.spanned(held.allocation)
        self.segments.append(Segment(job, held.start_s, held.end_s, useful, lost, held.allocation, blocks))

    def _preempt(self, job: int) -> None:
        held = self.running[job]
        held.useful_s = max(0.0, self.now - held.start_s - held.overhead_s)
        held.end_s = self.now + self.rules.save_s
        heappush(self.ends, (held.end_s, job))
        self.preemptions += 1

    # The reservation of the first job that waits.

    def _cancel(self) -> None:
        if self.reservation:
            self.nodes.open(self.reservation.nodes)
            self.reservation = None

    def _reserve(self, job: int) -> _Reservation:
        """The earliest time at which the job fits if nothing else starts, and nodes for it. It does not become earlier while the
        job waits, so one calculation per job is enough."""
        if self.reservation and self.reservation.job == job:
            return self.reservation
        self._cancel()
        one, counts, later, ends = self.jobs[job], self.nodes.counts(), dict[int, int](), self.ends.copy()
        freed: Counter[str] = Counter()
        time, seen = self.now, set[int]()  # a job that was preempted and went on at once has two entries
        while not (fits(counts, one.gpus) and self._quota_left(one, freed) >= 0):
            end = heappop(ends)
            if self._current(end) and end[1] not in seen:
                time = end[0]
                seen.add(end[1])
                self._free(end[1], counts, later, freed)
        found = _Reservation(job, time, self.nodes.enough(one.gpus, later), self._quota_left(one, freed))
        self.nodes.reserve(found.nodes)
        self.reserved.setdefault(job, time)
        self.reservation = found
        return found

    def _free(self, job: int, counts: list[int], later: dict[int, int], freed: Counter[str], sign: int = 1) -> None:
        """Count the GPUs of a running job as free, or with `sign` -1 as used again."""
        for node, gpus in self.running[job].allocation:
            free = later.get(node, self.nodes.free[node])
            counts[free] -= 1
            counts[free + sign * gpus] += 1
            later[node] = free + sign * gpus
        freed[self.jobs[job].team] += sign * self.jobs[job].gpus

    def _quota_left(self, job: Job, freed: Counter[str]) -> float:
        """GPUs of the cohort that remain beside the job once others have freed theirs; negative if it must wait. A job that fits
        into its team's quota waits for that quota, not for a loan."""
        if not self.cohort:
            return inf
        team = self.cohort.teams[job.team]
        most = team.quota if job.gpus <= team.quota else team.most
        own = most - (self.cohort.used[job.team] - freed[job.team] + job.gpus)
        return -1 if own < 0 else self.cohort.capacity - (self.cohort.total - freed.total() + job.gpus)

    # One queue.

    def _schedule_queue(self) -> None:
        queue = self.queues.get("", [])
        while queue:
            job = queue[0][1]
            if self.reservation and self.reservation.job != job:
                self._cancel()  # a job of higher priority has come first
            if not self._start(job, queue, 0, FIRST):
                break
            self.since.clear()  # whoever is next has its turn from now on, also if this job came ahead by its priority
        if queue and queue[0][1] not in self.since:
            self.since = {queue[0][1]: self.now}
        if queue and self.policy.backfill:
            if self.policy.preempts and self.jobs[queue[0][1]].priority > self.lowest:
                self._make_space(queue[0][1], self._lower(queue[0][1]))
            self._fill(queue, self._reserve(queue[0][1]))

    def _fill(self, queue: list[tuple[float, int]], reservation: _Reservation) -> None:
        """Backfill behind the first job of a queue."""
        if not self.nodes.fits(min(self.sizes)):
            return
        # A gang fits wherever a larger one does, so one failure settles all sizes from there on.
        too_large, too_large_for_long, position = inf, inf, 1
        for _ in range(min(len(queue) - 1, self.rules.depth)):
            job = queue[position][1]
            gpus = self.sized[job]
            if gpus < too_large:
                short = self.now + self.needs[job] <= reservation.time_s
                if short or gpus < too_large_for_long:
                    if self._start(job, queue, position, SHORT if short else LONG):
                        continue
                    too_large_for_long = min(gpus, too_large_for_long)
                    too_large = gpus if short else too_large
            position += 1

    # Preemption.

    def _lower(self, job: int) -> Callable[[int], bool]:
        """Running jobs that a job may preempt: of lower priority, and not ahead of it by age."""
        return lambda other: self.jobs[other].priority < self.jobs[job].priority and self.keys[other] > self.keys[job]

    def _borrowers(self, job: int) -> Callable[[int], bool]:
        """Running jobs of other teams that borrow."""
        cohort, own = self.cohort, self.jobs[job].team
        assert cohort
        return lambda other: self.jobs[other].team != own and cohort.borrows(self.jobs[other].team)

    def _make_space(self, job: int, may: Callable[[int], bool]) -> None:
        """Preempt running jobs if that starts the job earlier than waiting does."""
        soon = self.now + self.rules.save_s
        if self._reserve(job).time_s <= soon:
            return
        if victims := self._victims(job, (other for other in self.running if may(other)), soon):
            self._cancel()
            for victim in victims:
                self._preempt(victim)

    def _victims(self, job: int, candidates: Iterable[int], soon: float) -> list[int]:
        """The lowest priorities that suffice, and among them those that started last. Empty if not even all suffice."""
        order = sorted(
            (other for other in candidates if self.running[other].end_s > soon),
            key=lambda other: (self.jobs[other].priority, -self.running[other].start_s, -other),
        )
        if not order:
            return []
        one, counts, later = self.jobs[job], self.nodes.counts(), dict[int, int]()
        freed: Counter[str] = Counter()
        for other, held in self.running.items():
            if held.end_s <= soon:  # free in time anyway, as are jobs that write their checkpoint
                self._free(other, counts, later, freed)
        chosen: list[int] = []
        for other in order:
            if not self._still_borrows(other, freed):
                continue
            self._free(other, counts, later, freed)
            chosen.append(other)
            if fits(counts, one.gpus) and self._quota_left(one, freed) >= 0:
                break
        else:
            return []
        for other in list(chosen[:-1]):  # the last one was needed
            self._free(other, counts, later, freed, -1)
            if fits(counts, one.gpus) and self._quota_left(one, freed) >= 0:
                chosen.remove(other)
            else:
                self._free(other, counts, later, freed)
        return chosen

    def _still_borrows(self, job: int, freed: Counter[str]) -> bool:
        """Reclaim ends when a team is back at its quota."""
        if not self.cohort:
            return True
        team = self.jobs[job].team
        return self.cohort.used[team] - freed[team] > self.cohort.teams[team].quota

    # A queue per team.

    def _schedule_teams(self) -> None:
        while heads := self._heads():
            job, queue = heads[0]
            if self.reservation and self.reservation.job != job:
                self._cancel()
            if self._admit(job, queue):
                continue
            assert self.cohort
            if self.cohort.within(self.jobs[job].team, self.jobs[job].gpus):
                self._make_space(job, self._borrowers(job))
            reservation = self._reserve(job)
            if not any(self._admit(other, line) for other, line in heads[1:]):
                self._fill_team(queue, reservation)
                return

    def _heads(self) -> list[tuple[int, list[tuple[float, int]]]]:
        """The first job of each team: those within their quotas by the time they have been first, then those that borrow by
        their team's share. A team's backlog does not count: at most one job of each other team goes ahead."""
        cohort = self.cohort
        assert cohort

        def rank(head: tuple[int, list[tuple[float, int]]]) -> tuple[bool, float, int]:
            job, one = head[0], self.jobs[head[0]]
            over = not cohort.within(one.team, one.gpus)
            return over, cohort.share(one.team, one.gpus) if over else self.since[job], job

        heads = [(queue[0][1], queue) for queue in self.queues.values() if queue]
        for job, _ in heads:
            self.since.setdefault(job, self.now)
        return sorted(heads, key=rank)

    def _admit(self, job: int, queue: list[tuple[float, int]]) -> bool:
        """Start the first job of a team if its quota, the cohort and the reservation of another job allow it."""
        one, held = self.jobs[job], self.reservation
        assert self.cohort
        if not self.cohort.admits(one.team, one.gpus):
            return False
        if held is None or held.job == job:
            return self._start(job, queue, 0, FIRST)
        if self.now + self.needs[job] <= held.time_s:
            return self._start(job, queue, 0, SHORT)
        if one.gpus > held.spare or not self._start(job, queue, 0, LONG):
            return False
        held.spare -= one.gpus
        return True

    def _fill_team(self, queue: list[tuple[float, int]], reservation: _Reservation) -> None:
        """Start jobs behind their team's first if they end by the reserved start."""
        assert self.cohort
        team = self.jobs[queue[0][1]].team
        if not (self.cohort.admits(team, 1) and self.nodes.fits(min(self.sizes))):
            return
        position, too_large = 1, inf
        for _ in range(min(len(queue) - 1, self.rules.depth)):
            job = queue[position][1]
            gpus = self.sized[job]
            if gpus < too_large and self.now + self.needs[job] <= reservation.time_s:
                if self.cohort.admits(team, gpus) and self._start(job, queue, position, SHORT):
                    continue
                too_large = gpus  # neither quotas nor nodes have more left later
            position += 1
