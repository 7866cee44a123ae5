"""Results as tables, and as JSON with hardware, versions, settings and calibration."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from strata.platform import benchmark_record
from strata.serving.bench import itl_attribution
from strata.serving.bench.clients import cross_check
from strata.serving.bench.clients.load import Level
from strata.serving.bench.clients.measure import Summary
from strata.serving.bench.contenders.contenders import BARE, find
from strata.serving.bench.contenders.subject import Subject
from strata.serving.bench.results import Measured, Results, Settings

LABELS = {itl_attribution.GATEWAY: "in the gateway"}
RATIOS = ("tokens_per_s", "ttft_p50", "itl_p50", "itl_p99")
SPEEDS = ("tok/s", "req/s", "TTFT p50", "p99", "ITL p50", "p99", "TPOT p50", "E2E p50")


def table(settings: Settings, results: Results) -> Table:
    result = _table("load", "contender", *SPEEDS, "within SLO", "goodput/s", "tok/read", "remote", "errors", "client CPU")
    for level in settings.levels:
        for contender in results.ran:
            if one := results.at(contender, level):
                result.add_row(level.label, contender, *_speeds(one.summary), *_rest(one.summary), _percent(max(one.client_cpu)))
                for kind, summary in one.kinds.items():
                    result.add_row("", f"  {kind}", *_speeds(summary), *_rest(summary), "")
        result.add_section()
    return result


def ratio_table(settings: Settings, results: Results) -> Table:
    result = _table(f"÷ {BARE}", "contender", "tok/s", "TTFT p50", "ITL p50", "ITL p99")
    for level in settings.levels:
        for contender in results.ran:
            for kind, found in ratios(results, contender, level).items() if contender != BARE else ():
                cells = (_cell(value) for value in found.values())
                result.add_row("" if kind else level.label, f"  {kind}" if kind else contender, *cells)
        result.add_section()
    return result


def itl_table(settings: Settings, results: Results) -> Table:
    result = _table("load", "contender", "ITL by concurrent work", "share", "p50", "p99", "of slowest 1%")
    for level in settings.levels:
        for contender in results.ran:
            one = results.at(contender, level)
            for number, row in enumerate(itl_attribution.rows(one.gaps) if one else ()):
                names = ("", "") if number else (level.label, contender)
                longest = "" if row.of_longest is None else _percent(row.of_longest)
                result.add_row(
                    *names, LABELS.get(row.beside, row.beside), _percent(row.share), _ms(row.p50), _ms(row.p99), longest
                )
        result.add_section()
    return result


def cross_check_table(settings: Settings, results: Results) -> Table:
    result = _table("load", "contender", "client", *SPEEDS[:-1])
    level = cross_check.level_for(settings.levels)
    for contender, ran in results.ran.items():
        ours = results.at(contender, level) if level else None
        if level is None or ours is None or ran.cross_check is None:
            continue
        result.add_row(level.label, contender, "strata", *_speeds(ours.summary)[:-1])
        if "error" in ran.cross_check:
            result.add_row("", "", ran.cross_check["error"])
        else:
            theirs = ran.cross_check
            result.add_row("", "", "vllm bench serve", *_numbers(theirs)[:-1])
    return result


def ratios(results: Results, contender: str, level: Level) -> dict[str, dict[str, list[float]]]:
    """Ratios to bare vLLM at the same level, one of each round, for all requests (key "") and for each kind. Empty if no round
    has both."""
    pairs = results.pairs(contender, BARE, level)
    found = {"": [(one.summary, to.summary) for one, to in pairs]} if pairs else {}
    found |= {kind: [(one.kinds[kind], to.kinds[kind]) for one, to in pairs] for kind in (pairs[0][0].kinds if pairs else ())}
    return {
        kind: {name: _quotients([(getattr(one, name), getattr(to, name)) for one, to in rounds]) for name in RATIOS}
        for kind, rounds in found.items()
    }


def _quotients(pairs: Sequence[tuple[float | None, float | None]]) -> list[float]:
    return [one / to for one, to in pairs if one is not None and to]


def _cell(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    extremes = f" ({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}{extremes}"


def _medians(ratios: dict[str, list[float]]) -> dict[str, float | None]:
    return {name: statistics.median(found) if found else None for name, found in ratios.items()}


def as_json(subject: Subject, settings: Settings, results: Results) -> dict[str, Any]:
    return {
        **benchmark_record.header("serve"),
        "model": {"id": subject.model_id, "vocab": subject.vocab, "context": subject.context},
        "settings": asdict(settings) | {"serve": _serve(subject, settings), "words": subject.words},
        "calibration": asdict(results.calibration),
        "contenders": {
            name: {
                "about": find(name).about,
                "start_s": ran.start_s,
                "levels": [_level(results, name, one) for one in ran.measured],
                "cross_check": ran.cross_check,
            }
            for name, ran in results.ran.items()
        },
        "failed": results.failed,
    }


def _serve(subject: Subject, settings: Settings) -> dict[str, Any]:
    """The recipe's serve section, with the workload's `prefix_caching`."""
    return subject.section.model_dump(mode="json") | {"prefix_caching": settings.workload.prefix_caching}


def _level(results: Results, contender: str, one: Measured) -> dict[str, Any]:
    found = ratios(results, contender, one.level)
    every = found.pop("", {})
    kinds = {kind: _medians(of_kind) for kind, of_kind in found.items()}
    compared = {"ratios": _medians(every), "ratios_of_rounds": every, "ratios_of_kinds": kinds}
    return asdict(one) | compared | {"doubts": one.doubts(results.calibration)}


def line(summary: Summary) -> str:
    """One line per level, printed before the table."""
    speed = f"{summary.tokens_per_s:,.0f} tok/s · TTFT {_ms(summary.ttft_p50)} ms · ITL {_ms(summary.itl_p50)} ms"
    return f"{speed} (p99 {_ms(summary.itl_p99)})" + (f" · {summary.errors} errors" if summary.errors else "")


def _table(*columns: str) -> Table:
    result = Table(box=None, header_style="bold")
    for number, column in enumerate(columns):
        result.add_column(column, justify="left" if number < 2 else "right")
    return result


def _speeds(summary: Summary) -> list[str]:
    return _numbers(asdict(summary))


def _numbers(values: dict[str, Any]) -> list[str]:
    speeds = [f"{values['tokens_per_s']:,.0f}", f"{values['requests_per_s']:.1f}"]
    names = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "mean_itl_p50", "end_to_end_p50")
    return speeds + [_ms(values[name]) for name in names]


def _rest(summary: Summary) -> list[str]:
    per_read = "-" if summary.tokens_at_once is None else f"{summary.tokens_at_once:.2f}"
    remote = "" if summary.remote_share is None else _percent(summary.remote_share)
    return [_percent(summary.goodput_share), f"{summary.goodput_per_s:.1f}", per_read, remote, str(summary.errors)]


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.1f}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def _percent(share: float) -> str:
    return f"{share:.0%}"
