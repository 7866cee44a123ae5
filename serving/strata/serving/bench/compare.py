"""Runs the benchmark: starts each contender, drives it through all levels, and stops it.

With `side_by_side` all contenders are started first and driven one after another. The speed of a process varies from start to
start, and that of a shared machine over minutes; side by side, both affect all contenders alike.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.serving.bench import itl_attribution, plot, report
from strata.serving.bench.clients import calibration, cross_check, load, measure
from strata.serving.bench.contenders import server
from strata.serving.bench.contenders.contenders import BARE, find
from strata.serving.bench.contenders.subject import Subject
from strata.serving.bench.results import Measured, Ran, Results, Settings


class Stopped(Exception):
    """Ctrl-C. Carries the results so far."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self.results = results


def bench(
    subject: Subject, names: Sequence[str], settings: Settings, console: Console, json_file: Path, picture: Path
) -> Results:
    """Rewrites the files after each contender, so that an interrupted run leaves results.

    Raises `Stopped` on an interrupt, after all started processes have ended."""
    with console.status("Calibrating the clients …"):
        results = Results(calibration.calibrate(settings.clients))
    console.print(_calibrated(results.calibration))
    try:
        _compete(subject, names, settings, console, json_file, picture, results)
    except KeyboardInterrupt:
        if results.ran:
            _write(subject, settings, results, json_file, picture, partial=True)
        raise Stopped(results) from None
    return results


def _write(subject: Subject, settings: Settings, results: Results, json_file: Path, picture: Path, partial: bool) -> None:
    write_atomic(json_file, json.dumps(report.as_json(subject, settings, results) | {"partial": partial}, indent=2))
    write_atomic(picture, plot.draw(settings, results))


def _compete(
    subject: Subject,
    names: Sequence[str],
    settings: Settings,
    console: Console,
    json_file: Path,
    picture: Path,
    results: Results,
) -> None:
    logs = json_file.parent / "logs"
    present = []
    for name in names:
        if missing := find(name).missing():
            results.failed[name] = f"It needs {', '.join(missing)}, which is not installed."
            console.print(f"[bold]{name}[/] skipped: {results.failed[name]}")
        else:
            present.append(name)

    def drive(name: str, up: server.Server, number: int, show_status: Callable[[str], None]) -> None:
        if settings.rounds > 1:
            console.print(f"[bold]{name}[/], round {number + 1} of {settings.rounds}")
        measured: list[Measured] = []
        try:
            checked = _drive(name, up, subject, settings, number, logs, console, show_status, measured)
        except KeyboardInterrupt:
            if measured:
                results.add(name, number, Ran(up.start_s, measured, None))
            raise
        results.add(name, number, Ran(up.start_s, measured, checked))
        _write(subject, settings, results, json_file, picture, partial=True)

    def start(name: str, stack: ExitStack, show_status: Callable[[str], None]) -> server.Server | None:
        contender = find(name)
        show_status(f"Starting {name}: {contender.about} …")
        try:
            running = server.running(contender, subject, settings.workload.prefix_caching, logs / f"{name}.log")
            up = stack.enter_context(running)
        except server.Failed as failure:
            results.failed[name] = str(failure)
            console.print(f"[bold red]{name} failed.[/] {escape(str(failure))}")
            return None
        console.print(f"[bold]{name}[/] answers after {up.start_s:.1f} s")
        return up

    if settings.side_by_side:
        subject = replace(subject, sharing=len(present))
        with console.status("") as status, ExitStack() as stack:
            servers = {name: up for name in present if (up := start(name, stack, status.update))}
            for number in range(settings.rounds):
                for name in _in_turn(list(servers), number):
                    drive(name, servers[name], number, status.update)
    else:
        for number in range(settings.rounds):
            for name in _in_turn(present, number):
                with console.status("") as status, ExitStack() as stack:
                    if up := start(name, stack, status.update):
                        drive(name, up, number, status.update)
    if not results.ran:
        raise UserError("No contender started.", f"See their logs in {logs}.")
    _write(subject, settings, results, json_file, picture, partial=False)


def _in_turn(names: Sequence[str], number: int) -> Sequence[str]:
    """Alternating order, so that no contender always follows the same one."""
    return names if number % 2 == 0 else names[::-1]


def _drive(
    name: str,
    up: server.Server,
    subject: Subject,
    settings: Settings,
    round_number: int,
    logs: Path,
    console: Console,
    show_status: Callable[[str], None],
    measured: list[Measured],
) -> dict[str, Any] | None:
    """Appends each finished level to `measured`. Returns the cross-check."""
    for number, level in enumerate(settings.levels):
        show_status(f"{name}: {level.label} …")
        # A prefix cache must not contain these prompts from an earlier level or, in a server that stays up, an earlier round.
        seed = load.seed(settings.seed, round_number, len(settings.levels), number)
        before = itl_attribution.read(up.target)
        try:
            outcome = load.run(up.target, settings.workload, level, settings.clients, seed)
        except load.Interrupted as interrupted:
            if interrupted.outcome.records:
                measured.append(_measured(level, interrupted.outcome, settings, {}))
            raise
        histograms = itl_attribution.between(before, itl_attribution.read(up.target))
        measured.append(_measured(level, outcome, settings, histograms))
        summary = measured[-1].summary
        console.print(f"  {level.label}: {report.line(summary)}")
        if summary.first_error:
            console.print(f"  [red]first error:[/] {escape(summary.first_error)}")
    level_there = cross_check.level_for(settings.levels) if settings.cross_check else None
    checked = None
    if level_there:
        show_status(f"{name}: vllm bench serve, {level_there.label} …")
        checked = cross_check.run(up.target, subject, settings.workload, level_there, settings.seed, logs / name)
    return checked


def _measured(level: load.Level, outcome: load.Outcome, settings: Settings, histograms: itl_attribution.Histograms) -> Measured:
    summary = measure.summarise(outcome.records, settings.slo)
    return Measured(level, summary, measure.by_kind(outcome.records, settings.slo), outcome.client_cpu, histograms)


def _calibrated(found: calibration.Calibration) -> str:
    measured = f"ITL p50 {1000 * found.itl_p50:.2f}, p99 {1000 * found.itl_p99:.2f} ms at a pace of {1000 * found.pace_s:.0f} ms"
    return f"{found.clients} client processes: capacity {found.events_per_s:,.0f} events/s, measure {measured}"


def show(settings: Settings, results: Results, console: Console) -> None:
    console.print(report.table(settings, results))
    console.print(
        "[dim]Latencies in ms. ITL: time between events; TPOT: mean ITL of a request; tok/read: tokens per read of the client.[/]"
    )
    if BARE in results.ran and len(results.ran) > 1:
        console.print(report.ratio_table(settings, results))
    if any(one.gaps for ran in results.ran.values() for one in ran.measured):
        console.print(report.itl_table(settings, results))
    if settings.cross_check:
        console.print(report.cross_check_table(settings, results))
    for name, ran in results.ran.items():
        for one in ran.measured:
            if doubts := one.doubts(results.calibration):
                console.print(f"[yellow]{name}, {one.level.label}: {doubts}: the clients may be the bottleneck.[/]")
    for name, reason in results.failed.items():
        console.print(f"[red]{name} has no results:[/] {escape(reason.splitlines()[0])}")
