"""Runs `strata chaos`: parses its options, starts the endpoint and reports the results."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import httpx
from rich.console import Console

from strata.platform import ports
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.serving import access
from strata.serving.chaos import adapters as random_adapters
from strata.serving.chaos import edges, endpoint, kills, report, timeline, victims
from strata.serving.chaos.requests import Request, make
from strata.serving.chaos.run import Outcome
from strata.serving.chaos.run import run as carry_out
from strata.serving.chaos.victims import Kind
from strata.serving.models import choice


def run(
    overrides: Sequence[str],
    run_name: str | None,
    model: Path | None,
    url: str | None,
    kill: str,
    at_random: int | None,
    count: int,
    concurrency: int,
    seed: int,
    overlap: bool,
    path: Path | None,
    adapters: int = 0,
) -> bool:
    """Returns whether every answer was the same and the endpoint recovered."""
    faults = parse_faults(kill)
    if at_random is not None:
        if not faults:
            raise UserError("--random needs processes to draw from, and --kill is empty.", "Name them with --kill.")
        faults = kills.at_random(faults, at_random, seed)
    if url and (overrides or run_name or model):
        raise UserError("--url names a running endpoint, which excludes --run, --model and overrides.", "Use either.")
    if url and adapters:
        raise UserError("--adapters needs an endpoint that was started for them, and --url names one.", "Omit --url.")
    console = Console(highlight=False, soft_wrap=True)
    made = None
    if adapters:
        made = random_adapters.make(choice.choose(overrides, run_name, model, None).folder.resolve(), adapters, seed)
        overrides = [*made.overrides(), *overrides]
    with contextlib.ExitStack() as stack:
        if url is None:
            with console.status("Starting the endpoint …"):
                url = stack.enter_context(endpoint.started(overrides, run_name, model))
        url = url.rstrip("/")
        with console.status(f"{count} requests undisturbed, then with {sum(map(len, faults))} kills …"):
            requests, node = requests_for(url, count, seed, list(made.steady) if made else []), victims.node_of(url)
            given = (concurrency, seed, overlap, None, at_random is not None, made.passing if made else None)
            outcome = carry_out(url, node, requests, faults, *given)
    _report(outcome, path or cache_dir() / "bench" / "chaos.json", console)
    return outcome.holds


def kill_at_start_or_stop(
    overrides: Sequence[str],
    run: str | None,
    model: Path | None,
    url: str | None,
    kill: str,
    during: str,
    seed: int,
    path: Path | None,
) -> bool:
    """Kills while endpoints start or stop. Returns whether each came up or ended correctly."""
    edge = next((edge for edge in get_args(edges.Edge) if edge == during), None)
    if edge is None or url:
        raise UserError(
            f"--during {during} is not valid{' with --url' if url else ''}.",
            "Use --during start or --during stop, without --url.",
        )
    console = Console(highlight=False, soft_wrap=True)
    kill_during = edges.kill_at_start if during == "start" else edges.kill_at_stop
    endings = []
    path = path or cache_dir() / "bench" / f"chaos-{during}.json"
    for number, fault in enumerate(parse_faults(kill)):
        with ports.reserve() as held, console.status(f"Killing {' and '.join(fault)} during {during} …"):
            command = endpoint.command(overrides, run, model, held.port)
            ending = kill_during(command, endpoint.log_file(), held.url, fault, seed + number)
        endings.append(ending)
        write_atomic(path, json.dumps(report.edges_as_json(edge, endings), indent=2))
        console.print(f"{'+'.join(fault)} during {during}: {ending.what}", style=None if ending.holds else "red", markup=False)
    console.print(f"written to {path}")
    return all(ending.holds for ending in endings)


def parse_faults(text: str) -> list[kills.Fault]:
    """Parses `decode=2,gateway+controller`: faults with their number, processes of a fault joined by +."""
    faults: list[kills.Fault] = []
    for part in filter(None, text.split(",")):
        names, equals, times = part.partition("=")
        kinds = names.split("+")
        if not set(kinds) <= set(Kind) or (equals and not times.isdigit()):
            fix = f"Use {', '.join(Kind)}, with a number (decode=2) or joined by + (decode+controller)."
            raise UserError(f"--kill: '{part}' is not valid.", fix)
        faults += [tuple(Kind(kind) for kind in kinds)] * int(times or 1)
    return faults


def requests_for(url: str, count: int, seed: int, adapters: Sequence[str] = ()) -> tuple[Request, ...]:
    """Requests for the endpoint's model and its adapters, within its context length."""
    try:
        card = httpx.get(f"{url}/v1/models", headers=access.headers_for(url)).raise_for_status().json()["data"][0]
    except httpx.HTTPError as error:
        raise UserError(
            f"No endpoint answers at {url}: {error}", "Start the endpoint with 'make serve', or omit --url."
        ) from None
    return make(count, seed, card["id"], card["max_model_len"], adapters)


def _report(outcome: Outcome, path: Path, console: Console) -> None:
    console.print(report.summary(outcome))
    console.print(report.kills_table(outcome))
    if outcome.adapters is not None:
        console.print(outcome.adapters.line(), markup=False)
    for line in report.failures(outcome):
        console.print(line, markup=False, style="red")
    write_atomic(path, json.dumps(report.as_json(outcome), indent=2))
    picture = path.with_suffix(".png")
    timeline.draw(outcome, picture)
    verdict = "passed: every answer is the same as undisturbed" if outcome.holds else "failed"
    console.print(f"{verdict}; written to {path} and {picture}")
