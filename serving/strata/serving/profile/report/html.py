"""Page of a profile of an endpoint: findings, pictures and tables."""

from collections.abc import Iterator, Sequence
from html import escape

from strata.platform.profile import page as pages
from strata.platform.profile import svg
from strata.platform.profile.finding import Finding, named
from strata.platform.profile.page import ms, table
from strata.platform.profile.roofline import points
from strata.platform.profile.svg import Mark
from strata.serving.bench.clients import measure
from strata.serving.profile.analysis.findings import NONE
from strata.serving.profile.analysis.phases import PHASES, Phases
from strata.serving.profile.analysis.scheduler_log import Request
from strata.serving.profile.analysis.summary import CAUSES, EngineSummary, Summary
from strata.serving.profile.machine import Machine
from strata.serving.profile.report.record import work_by_class
from strata.serving.profile.request_lanes import spans

ROWS = 40
LANES = 40  # requests of a picture
REQUEST = ("waiting", "prefill", "decode")


def page(summary: Summary, machine: Machine, found: Sequence[Finding], load: measure.Summary) -> str:
    engines = summary.engines
    facts = [
        f"{len(engines)} engines on {engines[0].engine.facts['device']}",
        f"{load.requests} requests in {summary.window:.2f} s",
    ]
    if load.ttft_p50 is not None and load.itl_p50 is not None:
        facts.append(f"median TTFT {ms(load.ttft_p50)} ms and ITL {ms(load.itl_p50)} ms while profiled, which is slower")
    if (least := min(each.available for each in engines)) < 0.95:
        facts.append(f"engines waited for processors of other processes for up to {1 - least:.0%} of the time")
    causes = [name for name in CAUSES if any(each.seconds[name] > 0 for each in engines)]
    parts = [
        "<h1>Profile of an endpoint</h1>",
        f'<p class="soft">{escape("; ".join(facts))}.</p>',
        "<h2>Findings</h2>",
        "".join(f"<p>{escape(line)}</p>" for line in named(found, NONE)),
        "<h2>Time by cause</h2>",
        svg.bars({each.name: each.seconds for each in engines}, CAUSES, "Time of each engine by cause"),
        svg.legend(causes, CAUSES),
        table(("cause", *(f"{each.name}, ms" for each in engines)), _cause_rows(summary, causes)),
        "<h2>Steps</h2>",
        svg.timeline({each.name: [*_steps(each)] for each in engines}, summary.window, "Phases of each engine over the load"),
        svg.legend(PHASES, PHASES),
        table(("engine, phase", "count", "mean, ms", "total, ms"), _phase_rows(summary)),
    ]
    for engine in engines:
        parts += _engine(engine, machine)
    return pages.document(parts)


def _engine(engine: EngineSummary, machine: Machine) -> list[str]:
    begin, end = engine.engine.window
    parts: list[str] = []
    if lanes := {f"request {number}": [*_spans(each, begin)] for number, each in enumerate(engine.requests[:LANES])}:
        parts += [
            f"<h2>Requests, {engine.name}</h2>",
            svg.timeline(lanes, engine.window, "Requests in the engine, from arrival to end"),
            svg.legend(REQUEST, REQUEST),
        ]
    placed = points(engine.works, max(engine.steps, 1))
    if machine.peak and placed:
        parts += [f"<h2>Roofline, {engine.name}</h2>", svg.roofline(placed, machine.peak, machine.bandwidth)]
    columns = ("class, phase, name, shape", "ms", "calls", "TFLOP/s", "of peak")
    parts += [f"<h2>Work, {engine.name}</h2>", table(columns, _work_rows(engine, machine))]
    memory = [(at - begin, size) for at, size in engine.engine.trace.memory if begin <= at < end]
    if len(memory) > 1:
        parts += [f"<h2>Memory, {engine.name}</h2>", svg.memory(memory)]
    cache = [(step.begin - begin, step.kv) for step in engine.engine.log.steps if begin <= step.begin < end]
    if len(cache) > 1:
        most = max(share for _, share in cache)
        parts += [f"<h2>KV cache, {engine.name}</h2>", svg.line(cache, "KV cache in use", f"peak {most:.1%} of the blocks")]
    return parts


def _steps(engine: EngineSummary) -> Iterator[Mark]:
    begin, end = engine.engine.window
    for first, last, phase in Phases(engine.engine.trace).ranges:
        if begin <= first < end:
            yield Mark(phase, first - begin, last - first, svg.colour(phase, PHASES))


def _spans(request: Request, begin: float) -> Iterator[Mark]:
    for name, first, last in spans(request):
        yield Mark(f"{request.name}: {name}", first - begin, last - first, svg.colour(name, REQUEST))


def _cause_rows(summary: Summary, causes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for name in causes:
        yield name, *(ms(each.seconds[name]) for each in summary.engines)


def _phase_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    for engine in summary.engines:
        for phase in PHASES:
            if count := engine.count(phase):
                yield f"{engine.name}, {phase}", f"{count:,}", ms(engine.mean(phase)), ms(engine.phases[phase].seconds)


def _work_rows(engine: EngineSummary, machine: Machine) -> Iterator[tuple[str, ...]]:
    for each in work_by_class(engine)[:ROWS]:
        rate = each["flops"] / each["s"] if each["s"] else 0.0
        of_peak = f"{rate / machine.peak:.0%}" if rate and machine.peak else ""
        name = ", ".join(filter(None, (each["class"], each["phase"], each["name"], each["shape"])))
        yield name, ms(each["s"]), f"{each['calls']:,.0f}", f"{rate / 1e12:,.3g}" if rate else "", of_peak
