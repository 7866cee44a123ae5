"""Analyzes the traces of a folder, prints the findings and writes the reports beside the traces."""

import json
from pathlib import Path

from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.profile import trace
from strata.platform.profile.finding import Finding, named
from strata.platform.recipe import Recipe
from strata.training.profile import machine as machines
from strata.training.profile.analysis.findings import NONE, findings
from strata.training.profile.analysis.summary import summarize
from strata.training.profile.report import html, record, tables


def report(folder: Path, recipe: Recipe, console: Console) -> list[Finding]:
    with console.status("reading the traces"):
        traces = [each for each in trace.read(folder) if each.steps()]
        if not traces:
            raise UserError(f"{folder} has no trace with a whole step.", "Profile more steps.")
        summary = summarize(traces, recipe)
    machine = machines.of(summary)
    found = findings(summary, machine)
    for rank in summary.ranks:
        console.print(tables.kinds(rank, machine.peak))
    console.print(tables.products(summary.ranks[0], machine.peak))
    console.print(tables.slowest(summary.ranks[0]))
    if machine.planned:
        console.print(tables.planned(machine.planned))
    for line in named(found, NONE):
        console.print(line, markup=False)
    write_atomic(folder / "profile.json", json.dumps(record.as_json(summary, machine, found), indent=2))
    write_atomic(folder / "report.html", html.page(summary, machine, found))
    console.print(f"written to {folder}: report.html, profile.json, and traces for https://ui.perfetto.dev")
    return found
