"""The command `strata chaos`. Light imports only: the command line loads this module for its help."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform.recipe_file import Overrides


def chaos(
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Serve the export of this run. Default: the newest run with an export.")] = None,
    model: Annotated[Path | None, typer.Option(help="Serve this Hugging Face model folder instead of a run.")] = None,
    url: Annotated[str | None, typer.Option(help="A running endpoint on this machine, instead of a new one.")] = None,
    kill: Annotated[
        str,
        typer.Option(
            help="Processes to kill: prefill, decode, gateway, prefill-engine, decode-engine, controller (of Ray Serve), gcs. "
            "decode=2: two, one after another. decode+gateway: both simultaneously. Empty: none."
        ),
    ] = "prefill,decode,gateway",
    random: Annotated[
        int | None,
        typer.Option(
            help="Number of faults, drawn from --kill, at random times. An engine is killed only while another answers."
        ),
    ] = None,
    during: Annotated[
        str | None,
        typer.Option(help="start or stop: kill while an endpoint starts or stops instead, one endpoint per fault."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests in the set.", min=1)] = 300,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the requests, the kill times and the choice of processes.")] = 0,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Kill the next replica of a role before the last one is replaced.")
    ] = False,
    adapters: Annotated[
        int,
        typer.Option(
            help="Make this many random LoRA adapters on the model: requests name half of them, the others come and go.", min=0
        ),
    ] = 0,
    json: Annotated[
        Path | None,
        typer.Option(help="The JSON file to write. Default: chaos.json, chaos-start.json or chaos-stop.json in .strata/bench."),
    ] = None,
) -> None:
    """Kill replicas under load and compare every greedy answer with an undisturbed run.

    Exits with 1 if an answer is lost or different, or if the endpoint does not recover. '--kill decode=2,gateway+controller'
    kills two decode replicas, one after the other, and a gateway together with Ray Serve's controller."""
    from strata.serving.chaos import session

    if during is not None:
        if not session.kill_at_start_or_stop(overrides or [], run, model, url, kill, during, seed, json):
            raise typer.Exit(1)
        return
    if not session.run(overrides or [], run, model, url, kill, random, requests, concurrency, seed, overlap, json, adapters):
        raise typer.Exit(1)
