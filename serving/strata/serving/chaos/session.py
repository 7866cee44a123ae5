"""A `strata chaos` from its words to its report."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console

from strata.platform import ports
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.serving import access
from strata.serving.chaos import edges, endpoint, kills, report, timeline, victims
from strata.serving.chaos.requests import Request, make
from strata.serving.chaos.run import Outcome
from strata.serving.chaos.run import run as carry_out
from strata.serving.chaos.victims import Kind


def hold(
    overrides: Sequence[str],
    run: str | None,
    model: Path | None,
    url: str | None,
    kill: str,
    at_random: int | None,
    count: int,
    concurrency: int,
    seed: int,
    overlap: bool,
    path: Path | None,
) -> bool:
    """Whether everything held."""
    blows = parse_blows(kill)
    if at_random is not None:
        if not blows:
            raise UserError("--random has nothing to draw from.", "Name with --kill what may be killed.")
        blows = kills.at_random(blows, at_random, seed)
    if url and (overrides or run or model):
        raise UserError("--url names an endpoint that runs already, so there is nothing to serve.", "Leave the rest out.")
    console = Console(highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        if url is None:
            with console.status("Starting the endpoint …"):
                url = stack.enter_context(endpoint.started(overrides, run, model))
        url = url.rstrip("/")
        with console.status(f"{count} requests undisturbed, then under {sum(map(len, blows))} kills …"):
            requests, node = requests_for(url, count, seed), victims.node_of(url)
            outcome = carry_out(url, node, requests, blows, concurrency, seed, overlap, spare=at_random is not None)
    _tell(outcome, path or cache_dir() / "bench" / "chaos.json", console)
    return outcome.holds


def at_an_edge(
    overrides: Sequence[str], run: str | None, model: Path | None, url: str | None, kill: str, during: str, seed: int
) -> bool:
    """Kills while endpoints start or stop. Whether each came up or ended as it should."""
    if during not in ("start", "stop") or url:
        raise UserError(
            f"--during {during}: there is no such moment of an endpoint that chaos starts.", "Use start or stop, without --url."
        )
    console = Console(highlight=False, soft_wrap=True)
    strike = edges.kill_at_start if during == "start" else edges.kill_at_stop
    holds = True
    for number, blow in enumerate(parse_blows(kill)):
        with ports.reserve() as held, console.status(f"An endpoint that loses {' and '.join(blow)} at its {during} …"):
            command = endpoint.command(overrides, run, model, held.port)
            ending = strike(command, endpoint.log_file(), endpoint.READY, blow, seed + number)
        holds &= ending.holds
        console.print(f"{'+'.join(blow)} at the {during}: {ending.what}", style=None if ending.holds else "red", markup=False)
    return holds


def parse_blows(text: str) -> list[kills.Blow]:
    """`decode=2,gateway+controller`: what is killed at once, as often as it is to be killed."""
    blows: list[kills.Blow] = []
    for part in filter(None, text.split(",")):
        names, equals, times = part.partition("=")
        kinds = names.split("+")
        if not set(kinds) <= set(Kind) or (equals and not times.isdigit()):
            fix = f"Use {', '.join(Kind)}: with how often (decode=2), or several at once (decode+controller)."
            raise UserError(f"--kill cannot read '{part}'.", fix)
        blows += [tuple(Kind(kind) for kind in kinds)] * int(times or 1)
    return blows


def requests_for(url: str, count: int, seed: int) -> tuple[Request, ...]:
    """As the endpoint's only model wants them."""
    try:
        card = httpx.get(f"{url}/v1/models", headers=access.headers_for(url)).raise_for_status().json()["data"][0]
    except httpx.HTTPError as error:
        raise UserError(
            f"Nothing answers at {url}: {error}", "Start the endpoint with 'make serve', or leave --url out."
        ) from None
    return make(count, seed, card["id"], card["max_model_len"])


def _tell(outcome: Outcome, path: Path, console: Console) -> None:
    console.print(report.summary(outcome))
    console.print(report.kills_table(outcome))
    for line in report.failures(outcome):
        console.print(line, markup=False, style="red")
    write_atomic(path, json.dumps(report.as_json(outcome), indent=2))
    picture = path.with_suffix(".png")
    timeline.draw(outcome, picture)
    verdict = "every answer is the undisturbed one" if outcome.holds else "not everything held"
    console.print(f"{verdict}; written to {path} and {picture}")
