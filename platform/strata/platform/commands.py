"""The commands `strata runs`, `strata doctor`, `strata model` and `strata cluster`."""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from strata.platform import doctor as checks
from strata.platform import runs as run_folders
from strata.platform.errors import UserError
from strata.platform.ray_cluster import cluster as ray_cluster
from strata.platform.ray_cluster import excluded_nodes

WAIT_S = 5.0  # between looks at shared storage
MESSAGE_S = 60.0
LONGEST_WAIT_S = 2 * 3600.0  # a terabyte in the time that it takes at 140 MB/s


def runs() -> None:
    """List the runs: state, step, losses, and whether an exported model exists."""
    found = run_folders.every()
    if not found:
        print("No runs yet. Train one with 'make train'.")
        return
    table = Table(box=None, header_style="bold")
    for column in ("run", "state", "step", "loss", "val loss", "export"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right")
    damaged, excluded = {}, {}
    for run in found:
        exported = "yes" if run.has_export() else "-"
        if damage := run.damage():
            damaged[run.name] = damage
            table.add_row(run.name, "damaged", "-", "-", "-", exported)
            continue
        excluded[run.name] = excluded_nodes.read(run.path)
        state = run.state()
        table.add_row(
            run.name, state.observed_status(), f"{state.step}/{state.steps}", _loss(state.loss), _loss(state.val_loss), exported
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for name, damage in damaged.items():
        console.print(f"{name}: {damage}", markup=False)
    for run in found:
        for one in excluded.get(run.name, []):
            console.print(f"{run.name}: {one.sentence(run.path)}", markup=False)


def model_pull(
    sources: Annotated[list[str], typer.Argument(help="Ids on Hugging Face, or URIs such as gs://bucket/model.")],
    wait: Annotated[bool, typer.Option("--wait", help="Copy nothing: wait until another process has.")] = False,
) -> None:
    """Copy models to STRATA_MODELS (default: Strata's cache) for later commands. A folder or a run needs no copy."""
    from strata.platform.model_families import copies, source

    for one in sources:
        if wait and source.is_remote(one):
            _wait_for_copy(one)
        print(copies.pull(one) if source.is_remote(one) else source.local(one))


def _wait_for_copy(model: str) -> None:
    from strata.platform.model_families import copies

    began = next_message = time.monotonic()
    while not copies.found(model):
        now = time.monotonic()
        if now - began > LONGEST_WAIT_S:
            minutes = f"{LONGEST_WAIT_S / 60:.0f} minutes"
            raise UserError(f"After {minutes} there is no copy of {model}.", "Look at the log of the job that copies it.")
        if now >= next_message:
            print(f"waiting for the copy of {model}, {now - began:.0f} s so far", flush=True)
            next_message = now + MESSAGE_S
        time.sleep(WAIT_S)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def doctor() -> None:
    """Check this machine: Python, memory, disk, GPUs, packages and ports."""
    findings = checks.examine()
    table = Table(box=None, show_header=False)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fails": "[bold red]fails[/]"}
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.part, finding.text)
    Console(soft_wrap=True).print(table)
    if any(finding.verdict == "fails" for finding in findings):
        raise typer.Exit(1)


def cluster_start(
    cpus: Annotated[int | None, typer.Option(help="CPUs to offer. Default: all of the machine's.")] = None,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard too.")] = False,
) -> None:
    """Start a local Ray cluster in the background. Train and serve use it until 'strata cluster stop'."""
    cluster = ray_cluster.start(cpus, dashboard)
    print(f"Ray at {cluster.address}" + (f", dashboard at http://{cluster.dashboard}" if cluster.dashboard else ""))


def cluster_status() -> None:
    """Print the address of the background Ray cluster, if one runs."""
    cluster = ray_cluster.find()
    print(f"Ray at {cluster.address} (process {cluster.pid})" if cluster else "No background Ray cluster is running.")


def cluster_stop() -> None:
    """Stop the Ray cluster that 'strata cluster start' started, and no other."""
    print("Stopped." if ray_cluster.stop() else "No background Ray cluster is running.")
