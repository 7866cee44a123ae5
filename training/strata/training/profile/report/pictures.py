"""Pictures of a training profile: time of a step by cause, and the phases of one step."""

from collections.abc import Iterator, Sequence

from strata.platform.profile import svg
from strata.platform.profile.svg import Mark
from strata.platform.profile.trace import Event
from strata.training.profile.analysis.phases import PHASES
from strata.training.profile.analysis.summary import RankSummary, Summary

CAUSES = (
    "products", "attention", "scores", "loss", "other work", "optimizer", "recomputation", "dispatch", "between phases", "data",
    "host reads", "allocation", "garbage collection", "gradient reduction", "exposed collectives", "waiting for other ranks",
)  # fmt: skip
EXCHANGES = ("collective ", "wait ")
COLLECTION = "gc "


def bars(summary: Summary) -> str:
    """One bar per rank: the causes of its typical step."""
    rows = {
        f"rank {rank.rank}": {**rank.seconds, "exposed collectives": summary.transfer, "waiting for other ranks": rank.waiting}
        for rank in summary.ranks
    }
    return svg.bars(rows, CAUSES, "Time of a step by cause, for each rank")


def timeline(ranks: Sequence[RankSummary]) -> str:
    """Phases and exchanges of the last profiled step of each rank, from its own beginning."""
    chosen = [(rank, rank.trace.steps()[-1]) for rank in ranks]
    rows = {f"rank {rank.rank}": [*_marks(step)] for rank, step in chosen}
    return svg.timeline(rows, max(step.seconds for _, step in chosen), "Phases of one step, with exchanges drawn inside them")


def _marks(step: Event) -> Iterator[Mark]:
    inside = [step]
    while inside:
        event = inside.pop()
        name = event.range or ""
        begin = event.begin - step.begin
        if name in PHASES:
            yield Mark(name, begin, event.seconds, svg.colour(name, PHASES))
        elif name.startswith((*EXCHANGES, COLLECTION)):
            cause = "garbage collection" if name.startswith(COLLECTION) else "exposed collectives"
            yield Mark(name, begin, event.seconds, svg.colour(cause, CAUSES), inside=True)
        if event.kind != "cpu_op" or event.children:
            inside.extend(event.children)
