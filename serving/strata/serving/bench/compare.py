"""One run: each contender in turn, started, driven through all levels, and stopped; or all started, and driven in turn.

A process is quick or slow for as long as it lives, and a shared machine is quick or slow for minutes: side by side, both
meet all contenders alike."""

import itertools
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
from strata.serving.bench import gaps, plot, report
from strata.serving.bench.clients import calibration, cross_check, load, measure
from strata.serving.bench.contenders import server
from strata.serving.bench.contenders.contenders import BARE, find
from strata.serving.bench.contenders.subject import Subject
from strata.serving.bench.results import Measured, Ran, Results, Settings


class Stopped(Exception):
    """Ctrl-C, with what was measured until then."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self.results = results


def bench(
    subject: Subject, names: Sequence[str], settings: Settings, console: Console, json_file: Path, picture: Path
) -> Results:
    """Files are written anew after each contender: a run that is cut short has shown something. Raises `Stopped` when it is
    interrupted, after all that it started has ended."""
    with console.status("Timing the clients against a server that only keeps a pace …"):
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
            results.failed[name] = f"It needs {', '.join(missing)}, not installed here."
            console.print(f"[bold]{name}[/] left out: {results.failed[name]}")
        else:
            present.append(name)

    def drive(name: str, up: server.Server, number: int, say: Callable[[str], None]) -> None:
        if settings.rounds > 1:
            console.print(f"[bold]{name}[/], round {number + 1} of {settings.rounds}")
        measured: list[Measured] = []
        try:
            checked = _drive(name, up, subject, settings, number, logs, console, say, measured)
        except KeyboardInterrupt:
            if measured:
                results.add(name, Ran(up.start_s, measured, None))
            raise
        results.add(name, Ran(up.start_s, measured, checked))
        _write(subject, settings, results, json_file, picture, partial=True)

    def start(name: str, stack: ExitStack, say: Callable[[str], None]) -> server.Server | None:
        contender = find(name)
        say(f"Starting {name}: {contender.about} …")
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
                # There and back, so that nobody always comes after the same one.
                for name in list(servers) if number % 2 == 0 else reversed(list(servers)):
                    drive(name, servers[name], number, status.update)
    else:
        for number, name in itertools.product(range(settings.rounds), present):
            with console.status("") as status, ExitStack() as stack:
                if up := start(name, stack, status.update):
                    drive(name, up, number, status.update)
    if not results.ran:
        raise UserError("No contender came to answer.", f"Their logs are in {logs}.")
    _write(subject, settings, results, json_file, picture, partial=False)


def _drive(
    name: str,
    up: server.Server,
    subject: Subject,
    settings: Settings,
    turn: int,
    logs: Path,
    console: Console,
    say: Callable[[str], None],
    measured: list[Measured],
) -> dict[str, Any] | None:
    """Adds each level to `measured` as it is done; returns the cross-check."""
    for number, level in enumerate(settings.levels):
        say(f"{name}: {level.label} …")
        # A prefix cache must not know these prompts from a level before, nor, in a server that stays up, from a round before.
        seed = settings.seed + turn * len(settings.levels) + number
        before = gaps.read(up.target)
        try:
            outcome = load.run(up.target, settings.workload, level, settings.clients, seed)
        except load.Interrupted as interrupted:
            if interrupted.outcome.records:
                measured.append(_measured(level, interrupted.outcome, settings, {}))
            raise
        lengths = gaps.between(before, gaps.read(up.target))
        measured.append(_measured(level, outcome, settings, lengths))
        summary = measured[-1].summary
        console.print(f"  {level.label}: {report.line(summary)}")
        if summary.first_error:
            console.print(f"  [red]first error:[/] {escape(summary.first_error)}")
    level_there = cross_check.level_for(settings.levels) if settings.cross_check else None
    checked = None
    if level_there:
        say(f"{name}: vllm bench serve, {level_there.label} …")
        checked = cross_check.run(up.target, subject, settings.workload, level_there, settings.seed, logs / name)
    return checked


def _measured(level: load.Level, outcome: load.Outcome, settings: Settings, lengths: gaps.Gaps) -> Measured:
    summary = measure.summarise(outcome.records, settings.slo)
    return Measured(level, summary, measure.by_kind(outcome.records, settings.slo), outcome.client_cpu, lengths)


def _calibrated(found: calibration.Calibration) -> str:
    seen = f"p50 {1000 * found.itl_p50:.2f}, p99 {1000 * found.itl_p99:.2f} ms for a pace of {1000 * found.pace_s:.0f} ms"
    return f"{found.clients} client processes can take {found.events_per_s:,.0f} events/s, and see {seen}"


def show(settings: Settings, results: Results, console: Console) -> None:
    console.print(report.table(settings, results))
    console.print("[dim]Latencies in ms. ITL: gaps between events; 'tok at once': tokens that came in one read.[/]")
    if BARE in results.ran and len(results.ran) > 1:
        console.print(report.ratio_table(settings, results))
    if any(one.gaps for ran in results.ran.values() for one in ran.measured):
        console.print(report.gap_table(settings, results))
    if settings.cross_check:
        console.print(report.cross_check_table(settings, results))
    for name, ran in results.ran.items():
        for one in ran.measured:
            if doubts := one.doubts(results.calibration):
                console.print(f"[yellow]{name}, {one.level.label}: {doubts}: it may be the clients that were measured.[/]")
    for name, reason in results.failed.items():
        console.print(f"[red]{name} has no numbers:[/] {escape(reason.splitlines()[0])}")
