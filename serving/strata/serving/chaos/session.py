"""A `strata chaos` from its words to its report."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.serving import access
from strata.serving.chaos import endpoint, report, timeline, victims
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
    count: int,
    concurrency: int,
    seed: int,
    overlap: bool,
    path: Path | None,
) -> bool:
    """Whether everything held."""
    kinds = parse_kinds(kill)
    if url and (overrides or run or model):
        raise UserError("--url names an endpoint that runs already, so there is nothing to serve.", "Leave the rest out.")
    console = Console(highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        if url is None:
            with console.status("Starting the endpoint …"):
                url = stack.enter_context(endpoint.started(overrides, run, model))
        url = url.rstrip("/")
        with console.status(f"{count} requests undisturbed, then under {len(kinds)} kills …"):
            outcome = carry_out(url, victims.node_of(url), requests_for(url, count, seed), kinds, concurrency, seed, overlap)
    _tell(outcome, path or cache_dir() / "bench" / "chaos.json", console)
    return outcome.holds


def parse_kinds(text: str) -> list[Kind]:
    """`decode=2,gateway`: each kind as often as it is to be killed."""
    kinds: list[Kind] = []
    for part in filter(None, text.split(",")):
        name, equals, times = part.partition("=")
        if name not in set(Kind) or (equals and not times.isdigit()):
            raise UserError(f"--kill cannot read '{part}'.", f"Use {', '.join(Kind)}, each alone or with how often: decode=2.")
        kinds += [Kind(name)] * int(times or 1)
    return kinds


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
