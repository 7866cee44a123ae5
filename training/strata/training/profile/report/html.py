"""Page of a training profile: findings, pictures and tables."""

from collections.abc import Iterable, Sequence
from html import escape

from strata.platform.profile import page as pages
from strata.platform.profile import svg
from strata.platform.profile.finding import Finding, named
from strata.platform.profile.page import ms, table
from strata.platform.profile.roofline import points
from strata.training.profile.analysis.expected import Machine
from strata.training.profile.analysis.findings import NONE
from strata.training.profile.analysis.phases import PHASES
from strata.training.profile.analysis.summary import Summary
from strata.training.profile.report import pictures
from strata.training.profile.report.record import utilization, work_by_class

ROWS = 40


def page(summary: Summary, machine: Machine, found: Sequence[Finding]) -> str:
    recipe, ranks = summary.recipe, summary.ranks
    first = ranks[0]
    share = utilization(summary, machine)
    facts = [f"{recipe.parallel.workers} workers on {first.trace.facts['device']}", f"a step of {ms(summary.step)} ms"]
    if share is not None:
        facts.append(f"MFU {share:.1%}")
    if (least := min(rank.available for rank in ranks)) < 0.95:
        facts.append(f"other processes took up to {1 - least:.0%} of the time, which is left out below")
    causes = [name for name in pictures.CAUSES if any(rank.seconds.get(name, 0.0) > 0 for rank in ranks)]
    parts = [
        "<h1>Profile of a training step</h1>",
        f'<p class="soft">{escape("; ".join(facts))}.</p>',
        "<h2>Findings</h2>",
        "".join(f"<p>{escape(line)}</p>" for line in named(found, NONE)),
        "<h2>Time by cause</h2>",
        pictures.bars(summary),
        svg.legend([*causes, "exposed collectives", "waiting for other ranks"], pictures.CAUSES),
        table(("cause", *(f"rank {rank.rank}, ms" for rank in ranks)), _cause_rows(summary)),
        "<h2>One step</h2>",
        pictures.timeline(ranks),
        svg.legend(PHASES, PHASES),
    ]
    if summary.transfers:
        exposed = [(name, f"{seconds * 1e3:,.3f}") for name, seconds in summary.transfers.items()]
        parts += ["<h2>Exposed collectives</h2>", table(("collective, ranks, bytes", "ms per step"), exposed)]
    found_points = points(first.works, len(first.steps))
    if machine.peak and found_points:
        parts += ["<h2>Roofline, rank 0</h2>", svg.roofline(found_points, machine.peak, machine.bandwidth)]
    parts += [
        "<h2>Work, rank 0</h2>",
        table(("class, phase, shape", "ms", "calls", "TFLOP/s", "of peak"), _work_rows(summary, machine)),
    ]
    if len(first.trace.memory) > 1:
        peaks = [(phase, f"{size / 2**20:,.0f}") for phase, size in first.memory.items()]
        parts += ["<h2>Memory, rank 0</h2>", svg.memory(first.trace.memory), table(("phase", "peak, MiB"), peaks)]
    if machine.planned:
        rows = [(name, ms(planned), ms(measured)) for name, (planned, measured) in machine.planned.items()]
        parts += ["<h2>Beside the plan</h2>", table(("class", "planned, ms", "measured, ms"), rows)]
    return pages.document(parts)


def _cause_rows(summary: Summary) -> Iterable[tuple[str, ...]]:
    for name in pictures.CAUSES:
        if any(rank.seconds.get(name, 0.0) > 0 for rank in summary.ranks):
            yield name, *(ms(rank.seconds.get(name, 0.0)) for rank in summary.ranks)
    yield "waiting for other ranks", *(ms(rank.waiting) for rank in summary.ranks)


def _work_rows(summary: Summary, machine: Machine) -> Iterable[tuple[str, ...]]:
    for each in work_by_class(summary.ranks[0])[:ROWS]:
        rate = each["flops"] / each["s"] if each["s"] else 0.0
        of_peak = f"{rate / machine.peak:.0%}" if rate and machine.peak else ""
        name = ", ".join(filter(None, (each["class"], each["phase"], each["shape"])))
        yield name, ms(each["s"]), f"{each['calls']:,.0f}", f"{rate / 1e12:,.3g}" if rate else "", of_peak
