"""One page without links to other files: findings, pictures and tables of a profile, in light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

from strata.training.profile.analysis.expected import Machine
from strata.training.profile.analysis.findings import Finding, named
from strata.training.profile.analysis.roofline import points
from strata.training.profile.analysis.summary import Summary
from strata.training.profile.report import svg
from strata.training.profile.report.record import utilization, work_by_class

ROWS = 40
LIGHT = (
    "#4269d0", "#a463f2", "#6b3fa0", "#3ca951", "#97bbf5", "#9498a0", "#ff8ab7", "#efb118", "#d6cfc4", "#ff725c",
    "#e2453c", "#b3202c", "#9c6b4e", "#2f7f79", "#6cc5b0", "#c9ccd1",
)  # fmt: skip
STYLE = """:root{color-scheme:light dark;--ink:#1b1e23;--soft:#5b616b;--page:#fff;--rule:#dfe3e8}
@media (prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#a3a9b3;--page:#16181c;--rule:#333840}}
body{margin:2rem auto;max-width:60rem;padding:0 1rem;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2.2rem}p,li{max-width:50rem}.soft{color:var(--soft)}
svg{width:100%;height:auto;display:block;margin:.6rem 0}svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.roof{stroke:var(--soft);stroke-width:1.5}.line{fill:none;stroke:#4269d0;stroke-width:1.5}circle{fill-opacity:.65}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}td,th{padding:.2rem .6rem;text-align:right;
border-bottom:1px solid var(--rule)}td:first-child,th:first-child{text-align:left}.scroll{overflow-x:auto}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem}.key{display:inline-block;width:.8em;height:.8em;
margin-right:.4em;border-radius:2px}""" + "".join(
    f".c{number}{{fill:{value};background:{value}}}" for number, value in enumerate(LIGHT)
)


def page(summary: Summary, machine: Machine, found: Sequence[Finding]) -> str:
    recipe, ranks = summary.recipe, summary.ranks
    first = ranks[0]
    share = utilization(summary, machine)
    facts = [f"{recipe.parallel.workers} workers on {first.trace.facts['device']}", f"a step of {_ms(summary.step)} ms"]
    if share is not None:
        facts.append(f"MFU {share:.1%}")
    if (least := min(rank.available for rank in ranks)) < 0.95:
        facts.append(f"other processes took up to {1 - least:.0%} of the time, which is left out below")
    causes = [name for name in svg.CAUSES if any(rank.seconds.get(name, 0.0) > 0 for rank in ranks)]
    parts = [
        "<h1>Profile of a training step</h1>",
        f'<p class="soft">{escape("; ".join(facts))}.</p>',
        "<h2>Findings</h2>",
        "".join(f"<p>{escape(line)}</p>" for line in named(list(found))),
        "<h2>Time by cause</h2>",
        svg.bars(ranks, summary.transfer),
        svg.legend([*causes, "exposed collectives", "waiting for other ranks"]),
        _table(("cause", *(f"rank {rank.rank}, ms" for rank in ranks)), _cause_rows(summary)),
        "<h2>One step</h2>",
        svg.timeline(ranks),
        svg.legend(svg.PHASES, svg.PHASES),
    ]
    if summary.transfers:
        exposed = [(name, f"{seconds * 1e3:,.3f}") for name, seconds in summary.transfers.items()]
        parts += ["<h2>Exposed collectives</h2>", _table(("collective, ranks, bytes", "ms per step"), exposed)]
    found_points = points(first.works, len(first.steps))
    if machine.peak and found_points:
        parts += ["<h2>Roofline, rank 0</h2>", svg.roofline(found_points, machine.peak, machine.bandwidth)]
    parts += [
        "<h2>Work, rank 0</h2>",
        _table(("class, phase, shape", "ms", "calls", "TFLOP/s", "of peak"), _work_rows(summary, machine)),
    ]
    if len(first.trace.memory) > 1:
        peaks = [(phase, f"{size / 2**20:,.0f}") for phase, size in first.memory.items()]
        parts += ["<h2>Memory, rank 0</h2>", svg.memory(first.trace.memory), _table(("phase", "peak, MiB"), peaks)]
    if machine.planned:
        rows = [(name, _ms(planned), _ms(measured)) for name, (planned, measured) in machine.planned.items()]
        parts += ["<h2>Beside the plan</h2>", _table(("class", "planned, ms", "measured, ms"), rows)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Strata profile</title>'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>'


def _cause_rows(summary: Summary) -> Iterable[tuple[str, ...]]:
    for name in svg.CAUSES:
        if any(rank.seconds.get(name, 0.0) > 0 for rank in summary.ranks):
            yield name, *(_ms(rank.seconds.get(name, 0.0)) for rank in summary.ranks)
    yield "waiting for other ranks", *(_ms(rank.waiting) for rank in summary.ranks)


def _work_rows(summary: Summary, machine: Machine) -> Iterable[tuple[str, ...]]:
    for each in work_by_class(summary.ranks[0])[:ROWS]:
        rate = each["flops"] / each["s"] if each["s"] else 0.0
        of_peak = f"{rate / machine.peak:.0%}" if rate and machine.peak else ""
        name = ", ".join(filter(None, (each["class"], each["phase"], each["shape"])))
        yield name, _ms(each["s"]), f"{each['calls']:,.0f}", f"{rate / 1e12:,.3g}" if rate else "", of_peak


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
