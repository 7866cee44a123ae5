"""The command `strata bench tenants`: latencies of one tenant while another sends its share, and many times its share.

Both tenants have the same weight, so each may run half of the engines' sequences. The quiet one always has as many requests open
as its share. The loud one has the same in the baseline, and `--flood` times as many in the flood. Rounds of both alternate.
Light imports only: the command line loads this module for its help.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe_file import Overrides

if TYPE_CHECKING:
    from strata.serving.bench.clients.load import Record, Target
    from strata.serving.bench.clients.measure import Summary
    from strata.serving.bench.clients.workloads import Workload

QUIET, LOUD = "quiet", "loud"
BASELINE, FLOOD = "baseline", "flood"
RATIOS = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
AIM = 1.1  # of the ratios at p99
OVERTIME = 1.5  # the loud tenant sends so many times the requests of the quiet one, to be there until that ends

Summaries = dict[str, list["Summary"]]  # of the quiet tenant, by phase


def bench_tenants(
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Serve this Hugging Face model folder.")] = None,
    run: Annotated[str | None, typer.Option(help="Serve the export of this run. Default: the newest with an export.")] = None,
    dummy_model_wanted: Annotated[
        bool, typer.Option("--dummy-model", help="Serve random weights in the shape of the recipe's model.")
    ] = False,
    recipe: Annotated[str | None, typer.Option(help="Recipe for the serve section. Default: the run's own, else laptop.")] = None,
    flood: Annotated[float, typer.Option(help="Load of the loud tenant in the flood, in multiples of its share.", min=1)] = 10,
    requests: Annotated[int, typer.Option(help="Requests of the quiet tenant in a round.", min=1)] = 200,
    rounds: Annotated[int, typer.Option(help="Rounds; results are medians.", min=1)] = 3,
    input: Annotated[int | None, typer.Option(help="Tokens per prompt. Default: 128, at most half the context.", min=1)] = None,
    output: Annotated[int | None, typer.Option(help="Tokens per answer. Default: 32, at most a quarter.", min=2)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.", min=0)] = 0,
    json: Annotated[Path | None, typer.Option(help="The JSON file to write. Default: .strata/bench/tenants.json.")] = None,
) -> None:
    """Measure how far a tenant's flood moves the TTFT and ITL of another, on an endpoint that this command starts."""
    import json as json_text
    import tempfile

    from rich.console import Console

    from strata.platform.files import cache_dir, write_atomic
    from strata.serving.bench.clients.workloads import Workload
    from strata.serving.bench.contenders import dummy_model, server, subject
    from strata.serving.bench.contenders.contenders import find

    if dummy_model_wanted and (model or run):
        raise UserError("--dummy-model excludes --model and --run.", "Use only one of them.")
    console, path = Console(highlight=False), json or cache_dir() / "bench" / "tenants.json"
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as temporary:
        if dummy_model_wanted:
            model = Path(temporary) / "dummy"
            dummy_model.write(model, recipe_file.load(recipe or recipe_file.DEFAULT, overrides or []))
        served = subject.choose(overrides or [], run, model, recipe)
        prompt, answer = input or min(128, served.context // 2), output or min(32, served.context // 4)
        if prompt + answer > served.context:
            raise UserError(f"{prompt + answer} tokens exceed the model's context of {served.context}.", "Lower --input.")
        share = served.section.decode.replicas * served.section.max_sequences // 2
        loads = {BASELINE: share, FLOOD: round(flood * share)}
        given = any(override.startswith("serve.max_queue=") for override in overrides or [])
        if not given and loads[FLOOD] - share > served.section.max_queue:
            served = subject.choose([*(overrides or []), f"serve.max_queue={loads[FLOOD]}"], run, model, recipe)
        if not share or loads[FLOOD] - share > served.section.max_queue:
            cause = f"{loads[FLOOD]} requests of a tenant whose share is {share} do not fit serve.max_queue."
            raise UserError(cause, f"Set serve.max_queue={loads[FLOOD]}, or lower --flood.")
        workload = Workload("uniform", served.vocab, prompt, answer, prompt, 0.0, 2)
        summaries: Summaries = {BASELINE: [], FLOOD: []}
        with keys(Path(temporary) / "tenants.yaml") as tenants, console.status("Starting the endpoint …") as status:
            log = path.parent / "logs" / "tenants.log"
            try:
                with server.running(find("strata"), served, False, log) as up:
                    for number in range(rounds):
                        for phase, concurrency in loads.items():
                            status.update(f"Round {number + 1} of {rounds}: {phase} …")
                            seed += 2
                            found = _measure(up.target, tenants, workload, share, concurrency, requests, seed)
                            summaries[phase].append(found)
            except server.Failed as failure:
                raise UserError(f"The endpoint did not start. {failure}", "Start it alone: strata serve.") from None
    settings = {"share": share, "flood": flood, "requests": requests, "rounds": rounds, "input": prompt, "output": answer}
    result = as_json(settings, summaries)
    console.print(table(result))
    write_atomic(path, json_text.dumps(result, indent=2))
    console.print(f"written to {path}")


@contextmanager
def keys(file: Path) -> Iterator[dict[str, str]]:
    """Keys of the two tenants, in a file that the endpoint reads. Yields the keys by tenant."""
    import os
    import secrets

    from strata.serving import access
    from strata.serving.gateway.keys import FILE
    from strata.serving.tenants import file as tenants_file
    from strata.serving.tenants.tenant import KeyEntry, digest

    made = {name: secrets.token_urlsafe() for name in (QUIET, LOUD)}
    entries = {name: (KeyEntry(sha256=digest(key.encode()).hex()),) for name, key in made.items()}
    tenants_file.write(file, {name: tenants_file.TenantEntry(keys=entry) for name, entry in entries.items()})
    before = {name: os.environ.get(name) for name in (FILE, access.KEY)}
    os.environ |= {FILE: str(file), access.KEY: made[QUIET]}
    try:
        yield made
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _measure(
    target: "Target", tenants: Mapping[str, str], workload: "Workload", share: int, loud: int, requests: int, seed: int
) -> "Summary":
    """Summary of the quiet tenant's requests during which the loud one sent its own."""
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import replace

    from strata.serving.bench.clients import load, measure

    levels = {
        QUIET: load.Level(max(requests, share), concurrency=share),
        LOUD: load.Level(max(round(OVERTIME * requests), 2 * loud), concurrency=loud),
    }
    with ThreadPoolExecutor(len(levels)) as pool:
        started = {
            name: pool.submit(load.run, replace(target, key=tenants[name]), workload, level, 1, seed + number)
            for number, (name, level) in enumerate(levels.items())
        }
        records = {name: outcome.result().records for name, outcome in started.items()}
    return measure.summarise(_during(records[QUIET], records[LOUD]), measure.Slo(1.0, 1.0))


def _during(quiet: Sequence["Record"], loud: Sequence["Record"]) -> "list[Record]":
    """Requests that ran while the others did."""
    if failed := next((record.error for record in (*quiet, *loud) if record.error), None):
        raise UserError(f"A request failed: {failed}.", "See the log of the endpoint.")
    begin, end = min(record.start for record in loud), max(record.end for record in loud)
    found = [record for record in quiet if record.start >= begin and record.end <= end]
    if not found:
        raise UserError("The tenants' requests did not overlap.", "Raise --requests.")
    return found


def as_json(settings: Mapping[str, Any], summaries: Summaries) -> dict[str, Any]:
    from dataclasses import asdict

    from strata.platform import benchmark_record
    from strata.serving.bench.clients import measure

    medians = {phase: measure.median(found) for phase, found in summaries.items()}
    ratios = {}
    for name in RATIOS:
        before, after = (getattr(medians[phase], name) for phase in (BASELINE, FLOOD))
        ratios[name] = after / before if before and after is not None else None
    phases = {phase: asdict(found) for phase, found in medians.items()}
    return {**benchmark_record.header("tenants"), "settings": dict(settings), "quiet": phases, "ratios": ratios}


def table(result: Mapping[str, Any]) -> Any:
    from rich.table import Table

    made = Table(f"{QUIET} tenant", BASELINE, FLOOD, "ratio", box=None, header_style="bold")
    for name in RATIOS:
        values = [f"{1000 * result['quiet'][phase][name]:.1f} ms" for phase in (BASELINE, FLOOD)]
        made.add_row(name.replace("_", " ").upper().replace(" P", " p"), *values, f"{result['ratios'][name]:.2f}")
    return made
