"""Measures a team, prints and writes the result, and returns the slow nodes."""

from dataclasses import dataclass
from json import dumps
from pathlib import Path

from rich.console import Console

from strata.planner import units
from strata.platform.files import cache_dir, write_atomic
from strata.platform.ray_cluster import cluster
from strata.platform.recipe import ParallelSection
from strata.training.bench.fabric import analysis, report
from strata.training.bench.fabric.measurement import measure
from strata.training.bench.fabric.member import Member
from strata.training.bench.fabric.teams import START_S, LocalTeam, RayTeam, Team

STEP = 16  # between sizes
SMALLEST = 2**14


@dataclass(frozen=True)
class Settings:
    """`sizes` in bytes, ascending. A node is slow below `share` of the others' median. `fabric` is a name of the catalogue."""

    sizes: tuple[int, ...]
    rounds: int
    share: float
    fabric: str | None = None
    json: Path | None = None


def sizes_up_to(largest: str) -> tuple[int, ...]:
    """Ascending sizes by a constant factor, in whole 4-byte values."""
    found = [max(4, int(units.size(largest, "--size")) // 4 * 4)]
    while found[0] // STEP >= SMALLEST:
        found.insert(0, found[0] // STEP // 4 * 4)
    return tuple(found)


def on_this_machine(processes: int, settings: Settings, member: type[Member] = Member) -> list[str]:
    team = LocalTeam(processes, member)
    try:
        return judge(team, settings)
    finally:
        team.stop()


def on_ray(parallel: ParallelSection, settings: Settings) -> list[str]:
    with cluster.connected(parallel.workers * parallel.cpus_per_worker):
        print(f"Waiting for {parallel.workers} workers, at most {START_S / 60:.0f} minutes", flush=True)
        team = RayTeam(parallel.workers, parallel.device == "gpu", parallel.cpus_per_worker)
        try:
            return judge(team, settings)
        finally:
            team.stop()


def judge(team: Team, settings: Settings) -> list[str]:
    console = Console(highlight=False, soft_wrap=True)
    with console.status("") as status:
        measured, gpu = measure(team, settings.sizes, settings.rounds, status.update)
    planned = report.plan(measured, gpu, settings.fabric)
    found = analysis.verdicts(measured, settings.share)
    paths = analysis.slow_paths(measured, found, settings.share)
    console.print(report.world_table(measured, planned))
    if len(found) > 1:
        console.print(report.node_table(found, settings.share))
    for line in report.notes(measured, paths, team.places, gpu is not None):
        console.print(line)
    file = settings.json or cache_dir() / "bench" / "fabric.json"
    write_atomic(file, dumps(report.record(measured, planned, found, paths, settings.share), indent=2))
    console.print(f"written to {file}")
    slow = [one.node for one in found if one.slow]
    if slow:
        console.print(f"[bold red]slow:[/] {', '.join(slow)}")
    return slow
