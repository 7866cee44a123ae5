"""`strata plan queue`: a simulation of gang scheduling.

Light imports only: the command line loads this module to print its help.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType

from strata.planner import ranges
from strata.planner.cli.options import Json, Plot, answer, number
from strata.planner.units import share, show
from strata.platform.errors import UserError, shown

if TYPE_CHECKING:
    from strata.planner.cluster.figures import Figures, Waits
    from strata.planner.cluster.jobs import Job, Team

PolicyName = Literal["fifo", "easy", "topology", "priority", "fair", "all"]
NAMES = ("a", "b")  # teams of a generated trace
LOAD = 0.9
WAITS = ("mean wait", "p50", "p95", "p99", "longest", "slowdown")


def plan_queue(
    gpus: Annotated[int, number("GPUs of the cluster.", ranges.QUEUE_GPUS)] = 256,
    teams: Annotated[
        str | None,
        typer.Option(help="Quotas of the teams in GPUs, such as a=64,b=64; b=64:32 may borrow 32. Default: equal parts."),
    ] = None,
    policy: Annotated[PolicyName, typer.Option(help="Scheduling policy.")] = "all",
    trace: Annotated[Path | None, typer.Option(help="Trace of Helios, Alibaba or Philly. Default: a generated one.")] = None,
    jobs: Annotated[int, number("Jobs of a generated trace.", ranges.JOBS)] = 2000,
    load: Annotated[float, number("GPU-hours that a generated trace asks for, over the cluster's.", ranges.LOAD)] = LOAD,
    demand: Annotated[
        str | None, typer.Option(help="Relative number of generated jobs of each team, such as a=2,b=1. Default: the quotas.")
    ] = None,
    seed: Annotated[int, number("Seed of a generated trace.", ranges.SEED)] = 0,
    gpus_per_node: Annotated[int, number("GPUs of a node.", ranges.NODE_GPUS)] = 8,
    block: Annotated[int, number("Nodes of a block: a rack, or a leaf switch.", ranges.BLOCK)] = 8,
    save: Annotated[float, number("Seconds of a preempted job's checkpoint.", ranges.PAUSE)] = 30.0,
    restart: Annotated[float, number("Seconds without progress when a preempted job starts again.", ranges.PAUSE)] = 60.0,
    ageing: Annotated[float, number("Hours in the queue that count as much as one priority.", ranges.AGEING)] = 12.0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Simulate a queue of gangs by scheduling policy: queue times, utilisation, fragmentation and preemptions.

    strata plan queue --gpus 128 --teams a=64,b=64 --demand a=3,b=1
    """
    from strata.planner.cluster import trace_files
    from strata.planner.cluster.draw import draw
    from strata.planner.cluster.figures import summarise
    from strata.planner.cluster.jobs import generate
    from strata.planner.cluster.policies import POLICIES, Rules
    from strata.planner.cluster.simulate import simulate
    from strata.platform import benchmark_record

    size = min(gpus_per_node, gpus)
    if gpus % size:
        raise UserError(f"--gpus {gpus} is not a multiple of --gpus-per-node {size}.", f"Use --gpus {gpus - gpus % size}.")
    if trace is not None and demand is not None:
        raise UserError("--demand is of a generated trace, and --trace names another.", "Use one of them.")
    read = trace_files.read(trace) if trace is not None else None
    cohort = _teams(teams, gpus, read)
    wanted = _demand(demand, cohort)
    asked = generate(gpus, jobs, load, wanted, seed) if read is None else read
    rules = Rules(save, restart, ageing * 3600)
    chosen = [POLICIES[name] for name in POLICIES if policy in ("all", name)]
    outcomes = [simulate(asked, gpus // size, size, one, cohort, block, rules) for one in chosen]
    found = [summarise(outcome, block, cohort, rules) for outcome in outcomes]
    source = str(trace) if trace is not None else f"generated, seed {seed}, load {load:g}"
    title = f"{len(asked):,} jobs ({source}) on {gpus:,} GPUs"

    def pictures(folder: Path) -> list[Path]:
        draw(outcomes, folder / "queue.png", title)
        return [folder / "queue.png"]

    def data() -> dict[str, Any]:
        return {
            **benchmark_record.header("plan-queue"),
            "gpus": gpus,
            "gpus_per_node": size,
            "block": block,
            "jobs": len(asked),
            "source": source,
            "teams": cohort,
            "rules": rules,
            "policies": {one.policy: one for one in found},
        }

    def parts(_: object) -> list[RenderableType]:
        return [_queue_times(found, title), _use(found), _by_team(found, cohort), _by_priority(found)]

    answer(parts, data, json, plot=plot, draw=pictures)


def _teams(text: str | None, gpus: int, trace: "Sequence[Job] | None") -> "list[Team]":
    """Teams with their quotas. Without --teams, the teams of the trace share the cluster equally."""
    from strata.planner.cluster.jobs import Team

    known = sorted({job.team for job in trace}) if trace is not None else None
    if text is None:
        names = known if known is not None else list(NAMES)
        if len(names) > gpus:
            raise UserError(f"The trace has {len(names):,} teams for {gpus:,} GPUs.", "Use more --gpus.")
        return [Team(name, gpus // len(names) + (number < gpus % len(names))) for number, name in enumerate(names)]
    found = []
    for name, value in _pairs(text, "--teams").items():
        quota, colon, limit = value.partition(":")
        if not quota.isdecimal() or int(quota) < 1 or (colon and not limit.isdecimal()):
            raise UserError(f"--teams: '{shown(name)}={shown(value)}' is not a quota.", "Write NAME=GPUS or NAME=GPUS:BORROWED.")
        found.append(Team(name, int(quota), int(limit) if colon else None))
    if (total := sum(team.quota for team in found)) > gpus:
        raise UserError(f"--teams: the quotas add up to {total:,} GPUs, and --gpus is {gpus:,}.", "Lower the quotas.")
    if missing := set(known or ()) - {team.name for team in found}:
        raise UserError(
            f"--teams lacks teams of the trace: {shown(', '.join(sorted(missing)))}.", "Name every team, or leave --teams out."
        )
    return found


def _demand(text: str | None, teams: "Sequence[Team]") -> dict[str, float]:
    if text is None:
        return {team.name: float(team.quota) for team in teams}
    found = {}
    for name, value in _pairs(text, "--demand").items():
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if not 0 <= found[name] < 1e9:
            raise UserError(f"--demand: '{shown(name)}={shown(value)}' is not a number of jobs.", "Write it as in a=2,b=1.")
    if unknown := found.keys() - {team.name for team in teams}:
        raise UserError(f"--demand names unknown teams: {shown(', '.join(sorted(unknown)))}.", "Use the names of --teams.")
    if not any(found.values()):
        raise UserError("--demand has no jobs.", "Give at least one team a number above 0.")
    return found


def _pairs(text: str, option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals and value):
            raise UserError(f"{option}: '{shown(word)}' is not NAME=NUMBER.", f"Write it as in {option} a=64,b=64.")
        if name in found:
            raise UserError(f"{option} names '{shown(name)}' twice.", "Name each team once.")
        found[name] = value
    return found


def _queue_times(found: "Sequence[Figures]", title: str) -> RenderableType:
    from strata.planner.cli.tables import grid
    from strata.planner.cluster.policies import POLICIES

    notes = [f"{one.policy}: {POLICIES[one.policy].about}" for one in found]
    notes.append("at head: longest time as the first of a queue; a job waits no longer than the bound once its turn has come")
    if refused := max(one.refused for one in found):
        notes.append(f"left out: up to {refused:,} jobs that ask for more than the cluster, or their team's quota and loan")
    table = grid(title, ["policy"], [*WAITS, "at head", "bound"], "\n".join(notes))
    for one in found:
        table.add_row(one.policy, *_cells(one.all), show(one.at_head_s, "s"), show(one.bound_s, "s"))
    return table


def _use(found: "Sequence[Figures]") -> RenderableType:
    from strata.planner.cli.tables import grid

    note = "fragments: idle GPUs of partly used nodes; blocks: blocks of a gang over the fewest possible; lost: GPU-hours"
    table = grid("use of the cluster", ["policy"], ["used", "fragments", "blocks", "preemptions", "lost", "makespan"], note)
    for one in found:
        table.add_row(
            one.policy,
            share(one.utilisation),
            share(one.fragmentation),
            f"{one.blocks:.2f}",
            f"{one.preemptions:,}",
            f"{one.lost_gpu_hours:,.1f}",
            show(one.makespan_s, "s"),
        )
    return table


def _by_team(found: "Sequence[Figures]", teams: "Sequence[Team]") -> RenderableType:
    from strata.planner.cli.tables import grid

    quotas = {team.name: team.quota for team in teams}
    table = grid("by team", ["policy", "team"], ["quota", "jobs", "GPU-h", *WAITS], "quotas bind under the policy fair only")
    for one in found:
        for name, waits in one.teams.items():
            table.add_row(one.policy, name, f"{quotas[name]:,}", f"{waits.jobs:,}", f"{waits.gpu_hours:,.0f}", *_cells(waits))
    return table


def _by_priority(found: "Sequence[Figures]") -> RenderableType:
    from strata.planner.cli.tables import grid

    note = "priorities count under the policy priority only"
    table = grid("by priority", ["policy", "priority"], ["jobs", "GPU-h", *WAITS], note)
    for one in found:
        for name, waits in one.priorities.items():
            table.add_row(one.policy, name, f"{waits.jobs:,}", f"{waits.gpu_hours:,.0f}", *_cells(waits))
    return table


def _cells(waits: "Waits") -> list[str]:
    times = (waits.mean_s, waits.p50_s, waits.p95_s, waits.p99_s, waits.longest_s)
    return [*(show(seconds, "s") for seconds in times), f"{waits.slowdown:.1f}"]
