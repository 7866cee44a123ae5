"""`strata chaos`. Light imports only: the command line loads this module for its help."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform.recipe_file import Overrides


def chaos(
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Serve what this run exported. Default: the newest run with an export.")] = None,
    model: Annotated[Path | None, typer.Option(help="Serve this Hugging Face model folder instead of a run.")] = None,
    url: Annotated[str | None, typer.Option(help="An endpoint that runs on this machine already, instead of a new one.")] = None,
    kill: Annotated[
        str,
        typer.Option(
            help="What to kill, how often: prefill, decode, gateway, prefill-engine, decode-engine, controller (Ray Serve's); "
            "several at once with +; or nothing at all."
        ),
    ] = "prefill,decode,gateway",
    random: Annotated[
        int | None,
        typer.Option(help="So many blows, each drawn from --kill, at random moments; an engine dies only while another answers."),
    ] = None,
    during: Annotated[
        str | None,
        typer.Option(help="Kill while an endpoint starts or stops instead: start or stop. One endpoint a blow."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests in the set.", min=1)] = 300,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Of the requests, of the kills' moments and of who is killed.")] = 0,
    overlap: Annotated[bool, typer.Option("--overlap", help="Kill a role's next replica before its last one is back.")] = False,
    json: Annotated[Path | None, typer.Option(help="The file to write. Default: chaos.json among the benchmarks.")] = None,
) -> None:
    """Kill replicas under load, and compare every greedy answer with the undisturbed one. Exits with 1 if one is lost or
    different, or if the endpoint is not whole again. '--kill decode=2,gateway+controller' kills two that decode, one after the
    other, and a gateway together with Ray Serve's controller."""
    from strata.serving.chaos import session

    if during is not None:
        if not session.at_an_edge(overrides or [], run, model, url, kill, during, seed):
            raise typer.Exit(1)
        return
    if not session.hold(overrides or [], run, model, url, kill, random, requests, concurrency, seed, overlap, json):
        raise typer.Exit(1)
