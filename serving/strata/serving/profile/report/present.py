"""Analyzes a collected profile, prints the findings and writes the reports beside the traces."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.profile.finding import Finding, named
from strata.serving.bench.clients import measure
from strata.serving.bench.clients.load import Record
from strata.serving.bench.clients.measure import Slo
from strata.serving.profile import folder, machine
from strata.serving.profile.analysis.findings import NONE, findings
from strata.serving.profile.analysis.summary import summarize
from strata.serving.profile.report import html, record, tables

SLO = Slo(float("inf"), float("inf"))  # a profiled endpoint is slower: its goodput says nothing


def report(target: Path, records: Sequence[Record], console: Console) -> list[Finding]:
    with console.status("reading the traces"):
        engines = folder.read(target)
        if not any(each.trace.steps() for each in engines):
            raise UserError(f"{target} has no trace with a step.", "Send more with --requests.")
        summary = summarize(engines)
    peaks = machine.of(summary.engines[0])
    found, load = findings(summary), measure.summarise(records, SLO)
    console.print(tables.causes(summary))
    console.print(tables.phases(summary))
    for engine in summary.engines:
        console.print(tables.operators(engine, peaks.peak))
    for line in named(found, NONE):
        console.print(line, markup=False)
    write_atomic(target / "profile.json", json.dumps(record.as_json(summary, peaks, found, load), indent=2))
    write_atomic(target / "report.html", html.page(summary, peaks, found, load))
    console.print(f"written to {target}: report.html, profile.json, and traces for https://ui.perfetto.dev")
    return found
