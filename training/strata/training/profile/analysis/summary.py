"""Typical step of a profile: medians over its steps, for each rank and for the job."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from strata.platform.profile.trace import Trace
from strata.platform.profile.work import Work
from strata.platform.recipe import Recipe
from strata.training.layout import accumulation, place
from strata.training.profile.analysis import contention
from strata.training.profile.analysis.account import RARE, Step, account
from strata.training.profile.analysis.phases import Phases, works

ONCE = ("optimizer", "between phases", "gradient reduction", *RARE)  # once a step, not once a micro-batch


@dataclass(frozen=True)
class RankSummary:
    """Seconds of a rank's typical step by cause. Those of a rare cause are of one occurrence."""

    rank: int
    stage: int
    available: float  # share of the time in which a processor was free for the training loop
    wall: float  # seconds of a step as measured, with waiting and other processes
    seconds: dict[str, float]
    waiting: float  # for other ranks
    flops: float
    communication: float  # seconds of collectives, hidden or not
    memory: dict[str, int]  # most bytes allocated, by phase
    works: tuple[Work, ...]
    trace: Trace
    steps: tuple[Step, ...]

    @property
    def own(self) -> float:
        """Work of this rank in every step."""
        return sum(seconds for cause, seconds in self.seconds.items() if cause not in RARE)

    @property
    def computing(self) -> float:
        """Work that scales with the model: neither data nor anything that happens once a step."""
        return sum(seconds for cause, seconds in self.seconds.items() if cause not in (*ONCE, "data", "garbage collection"))


@dataclass(frozen=True)
class Summary:
    recipe: Recipe
    ranks: tuple[RankSummary, ...]
    transfers: dict[str, float]  # exposed seconds of collectives by name, without waiting for a slower rank

    @property
    def micro_batches(self) -> int:
        return accumulation(self.recipe.train, self.recipe.parallel)

    @property
    def stages(self) -> int:
        return self.recipe.parallel.pipeline

    @property
    def transfer(self) -> float:
        return sum(self.transfers.values())

    @property
    def bubble(self) -> float:
        """Idle seconds of a stage while the pipeline fills and drains."""
        return (self.stages - 1) / self.micro_batches * max(rank.computing for rank in self.ranks)

    def rare(self, cause: str) -> float:
        """Seconds of an evaluation or a checkpoint, spread over the steps between two of them."""
        train = self.recipe.train
        every = train.eval_every if cause == "evaluation" else train.checkpoint_every
        return max(rank.seconds.get(cause, 0.0) for rank in self.ranks) / every

    @property
    def step(self) -> float:
        """Seconds of a step on machines without other processes."""
        slowest = max(rank.own for rank in self.ranks)
        return slowest + self.bubble + self.transfer + sum(self.rare(cause) for cause in RARE)


def summarize(traces: Sequence[Trace], recipe: Recipe) -> Summary:
    ranks = []
    for trace in traces:
        wall = median(event.seconds for event in trace.steps())
        memory = _memory(trace)  # first: its times stay those of the trace
        available = contention.remove(trace)
        found = works(trace)
        ranks.append(_rank(trace, recipe, wall, available, memory, found, account(trace, found)))
    transfers = _transfers({rank.rank: (rank.steps, rank.available) for rank in ranks})
    return Summary(recipe, tuple(_with_waiting(rank, transfers) for rank in ranks), transfers)


def _rank(
    trace: Trace,
    recipe: Recipe,
    wall: float,
    available: float,
    memory: dict[str, int],
    found: list[Work],
    steps: list[Step],
) -> RankSummary:
    causes = {cause for step in steps for cause in step.seconds}
    seconds = {cause: median(step.seconds.get(cause, 0.0) for step in steps) for cause in causes - set(RARE)}
    for cause in RARE:
        if occurrences := [step.seconds[cause] for step in steps if step.seconds.get(cause, 0.0) > 0]:
            seconds[cause] = median(occurrences)
    return RankSummary(
        rank=trace.rank,
        stage=place(trace.rank, recipe.parallel).stage,
        available=available,
        wall=wall,
        seconds=dict(sorted(seconds.items(), key=lambda each: -each[1])),
        waiting=median(sum(each.seconds for each in step.exchanges) for step in steps),
        flops=sum(work.flops for work in found if work.phase != "evaluation") / len(steps),
        communication=_communication(trace, found) / len(steps),
        memory=memory,
        works=tuple(found),
        trace=trace,
        steps=tuple(steps),
    )


def _memory(trace: Trace) -> dict[str, int]:
    places, most = Phases(trace), dict[str, int]()
    for at, size in trace.memory:
        phase = places.phase(at)
        most[phase] = max(most.get(phase, 0), size)
    return most


def _communication(trace: Trace, found: list[Work]) -> float:
    """Kernels of NCCL, or the work of gloo's threads, which includes waiting for other ranks."""
    if trace.on_gpu:
        return sum(work.seconds for work in found if work.kind == "collectives")
    threads = (roots for thread, roots in trace.roots.items() if thread != trace.main)
    return sum(event.seconds for roots in threads for event in roots if event.name.startswith("gloo:"))


def _numbered(step: Step) -> Iterator[tuple[tuple[str, int], float]]:
    """Exchanges by name and occurrence, which are the same on every rank of a group."""
    seen: Counter[str] = Counter()
    for each in step.exchanges:
        if not each.between_two:
            yield (each.name, seen[each.name]), each.seconds
            seen[each.name] += 1


def _transfers(ranks: dict[int, tuple[Sequence[Step], float]]) -> dict[str, float]:
    """Seconds per step of each collective without waiting: the rank that comes last waits for nobody. It waits for threads of
    the library, though, which other processes delay as much as the training loop."""
    shortest: dict[tuple[int, str, int], float] = {}
    for steps, available in ranks.values():
        for step in steps:
            for (name, occurrence), seconds in _numbered(step):
                key = (step.number, name, occurrence)
                shortest[key] = min(shortest.get(key, float("inf")), seconds * available)
    sums: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for (number, name, _), seconds in shortest.items():
        sums[name][number] += seconds
    return {name: median(by_step.values()) for name, by_step in sorted(sums.items())}


def _with_waiting(rank: RankSummary, transfers: dict[str, float]) -> RankSummary:
    names = {each.name for step in rank.steps for each in step.exchanges}
    return replace(rank, waiting=max(0.0, rank.waiting - sum(seconds for name, seconds in transfers.items() if name in names)))
