"""Results as tables, and as JSON with hardware, versions and every failure."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from strata.platform import benchmark_record, metrics
from strata.serving.chaos.edges import Edge, Ending
from strata.serving.chaos.kills import Kill
from strata.serving.chaos.run import Outcome, Pass, Verdict
from strata.serving.metrics import counters

SHOWN_FAILURES = 5
LABELS = {
    "broken by gateway": "broken by the death of a gateway",
    "sent again by the client": "retries by the client",
    "not back": "not replaced",
    "ended though not killed": "ended without a kill",
    "whole in the end": "recovered in the end",
}


def numbers(outcome: Outcome) -> dict[str, int]:
    """Counts from the clients, with the keys of the JSON file."""
    sent, lost = len(outcome.disturbed.sent), outcome.count(Verdict.LOST)
    return {
        "sent": sent,
        "answered": sent - lost,
        "lost": lost,
        "different": outcome.count(Verdict.DIFFERENT),
        "broken by gateway": outcome.broken_by_gateway,
        "sent again by the client": outcome.sent_again,
        "kills": len(outcome.kills),
        "not back": outcome.not_back,
        "ended though not killed": outcome.restarted,
        "whole in the end": int(outcome.recovered),
    }


def counted(one: Pass) -> dict[str, dict[str, float]]:
    """Counts from the endpoint's own metrics."""
    return {
        "retried": counters.by(one.counted, metrics.SERVE_RETRIES, "reason"),
        "migrated": counters.by(one.counted, metrics.SERVE_MIGRATIONS, "outcome"),
        "prefilled": counters.by(one.counted, metrics.SERVE_PREFILLS, "where", "reason"),
    }


def summary(outcome: Outcome) -> Table:
    """The disturbed run beside the undisturbed one."""
    table = Table(box=None, header_style="bold")
    table.add_column("requests")
    for name in _passes(outcome):
        table.add_column(name, justify="right")
    for name, number in numbers(outcome).items():
        table.add_row(
            LABELS.get(name, name), str(len(outcome.baseline.sent)) if name in ("sent", "answered") else "", str(number)
        )
    both = [counted(one) for one in _passes(outcome).values()]
    for what in both[0]:
        table.add_row(what, *(f"{sum(one[what].values()):g}" for one in both))
        for how in sorted(set().union(*(one[what] for one in both))):
            values = [one[what].get(how, 0.0) for one in both]
            if any(values):
                table.add_row(f"  {how}", *(f"{value:g}" for value in values))
    table.add_row("longest ITL", *(f"{one.longest_gap_s:.2f} s" for one in _passes(outcome).values()))
    table.add_row("duration", *(f"{one.ended - one.began:.1f} s" for one in _passes(outcome).values()))
    return table


def kills_table(outcome: Outcome) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("killed", "pid", "at s", "replaced after s", "refused for s", "answers after s"):
        table.add_column(column, justify="left" if column == "killed" else "right")
    for kill in sorted(outcome.kills, key=lambda kill: kill.at):
        since = (kill.back, kill.accepted, kill.answered)
        cells = [_seconds(kill, moment) for moment in (since if kill.kind == "gateway" else since[:1])]
        table.add_row(kill.kind, str(kill.pid), f"{kill.at - outcome.disturbed.began:.1f}", *cells)
    return table


def failures(outcome: Outcome) -> list[str]:
    """One line for each of the first failures. The JSON file has all."""
    of_adapters = outcome.adapters.failures if outcome.adapters is not None else ()
    return [
        f"request {one['request']} {one['verdict']}: " + (one["error"] or f"expected {one['expected']}, got {one['answer']}")
        for one in _failures(outcome)[:SHOWN_FAILURES]
    ] + list(of_adapters[:SHOWN_FAILURES])


def as_json(outcome: Outcome) -> dict[str, Any]:
    began = outcome.disturbed.began
    return {
        **benchmark_record.header("chaos"),
        "holds": outcome.holds,
        "numbers": numbers(outcome),
        "passes": {
            name: {
                "seconds": one.ended - one.began,
                "longest_gap_s": one.longest_gap_s,
                "counted": counted(one),
            }
            for name, one in _passes(outcome).items()
        },
        "kills": [
            {
                "kind": kill.kind,
                "blow": kill.fault,
                "pid": kill.pid,
                "at_s": kill.at - began,
                "back_after_s": _after(kill, kill.back),
                "refused_for_s": _after(kill, kill.accepted),
                "answers_again_after_s": _after(kill, kill.answered),
            }
            for kill in outcome.kills
        ],
        "failures": _failures(outcome),
        **({"adapters": asdict(outcome.adapters)} if outcome.adapters is not None else {}),
    }


def edges_as_json(during: Edge, endings: Sequence[Ending]) -> dict[str, Any]:
    """Kills while endpoints start or stop."""
    return {
        **benchmark_record.header("chaos-edges"),
        "during": during,
        "holds": all(ending.holds for ending in endings),
        "endings": [{"killed": list(ending.fault), "outcome": ending.what, "holds": ending.holds} for ending in endings],
    }


def _failures(outcome: Outcome) -> list[dict[str, Any]]:
    expected = outcome.expected
    return [
        {
            "request": one.number,
            "verdict": verdict,
            "began_s": one.attempts[0].began - outcome.disturbed.began,
            "ended_s": one.last.ended - outcome.disturbed.began,
            "error": one.last.error,
            "body": outcome.requests[one.number].body,
            "expected": asdict(expected[one.number]),
            "answer": asdict(one.last.answer) if one.last.answer else None,
        }
        for one, verdict in zip(outcome.disturbed.sent, outcome.verdicts(), strict=True)
        if verdict != Verdict.SAME
    ]


def _passes(outcome: Outcome) -> dict[str, Pass]:
    return {"undisturbed": outcome.baseline, "disturbed": outcome.disturbed}


def _after(kill: Kill, moment: float | None) -> float | None:
    return None if moment is None else moment - kill.at


def _seconds(kill: Kill, moment: float | None) -> str:
    return "never" if moment is None else f"{moment - kill.at:.2f}"
