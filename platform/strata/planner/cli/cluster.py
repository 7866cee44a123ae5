"""`strata plan cluster`: a whole fleet of GPUs.

Light imports only: the command line loads this module to print its help.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from strata.planner import ranges
from strata.planner.cli.options import GPU, Explain, GpuName, Json, Model, answer, number, open_model
from strata.planner.cli.output import jsonable
from strata.planner.errors import choose
from strata.planner.units import share, show, size
from strata.platform.errors import UserError
from strata.platform.recipe_file import Overrides

if TYPE_CHECKING:
    from strata.planner.cluster.fleet import ClusterPlan

MODEL = "llama-3.1-405b"
STEP_S = 10.0


def plan_cluster(
    gpus: Annotated[int, number("GPUs of the fleet.", ranges.FLEET_GPUS)],
    recipe: Annotated[str | None, typer.Option(help="Name or path of the recipe of each run: GPUs, state and step time.")] = None,
    overrides: Overrides = None,
    model: Model = None,
    state: Annotated[str | None, typer.Option(help=f"Bytes of a checkpoint, such as 5.6TB. Default: of {MODEL}.")] = None,
    run_gpus: Annotated[int | None, number("GPUs of each run. Default: one Ray cluster's.", ranges.FLEET_GPUS)] = None,
    step: Annotated[float | None, number(f"Seconds per step. Default: the recipe's plan, or {STEP_S:g}.", ranges.STEP)] = None,
    storage: Annotated[str | None, typer.Option(help="Total storage bandwidth. Default: by --stalled and --save.")] = None,
    stalled: Annotated[float, number("Share of time that saves may stall training.", ranges.STALLED)] = 0.01,
    save: Annotated[float, number("Seconds that a whole save, or a load at a restart, may last.", ranges.SOME_SECONDS)] = 300.0,
    checkpoints: Annotated[int | None, number("Checkpoints of a run. Default: the recipe's, or 3.", ranges.CHECKPOINTS)] = None,
    fleet: Annotated[str, typer.Option(help="Fleet with published failure rates ('strata plan list').")] = "llama3",
    detect: Annotated[float | None, number("Seconds to detect and diagnose a failure.", ranges.DETECT)] = None,
    repair: Annotated[float | None, number("Hours to repair a node.", ranges.REPAIR)] = None,
    scrape: Annotated[float, number("Seconds between scrapes.", ranges.SCRAPE)] = 15.0,
    retention: Annotated[float, number("Days of metrics on each Prometheus.", ranges.RETENTION)] = 15.0,
    gpu: GpuName = GPU,
    json: Json = None,
    explain: Explain = False,
) -> None:
    """Plan a fleet: Ray clusters and heads, Prometheus shards, checkpoint storage, failures, spares and goodput.

    strata plan cluster --gpus 100000
    """
    from strata.planner.catalogue.fleets import FLEETS
    from strata.planner.cluster import fleet as fleets
    from strata.planner.plan import state_bytes
    from strata.planner.reliability.failures import HOUR, USUAL

    given = [name for name, value in (("--recipe", recipe), ("--model", model), ("--state", state)) if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} all set the size of a checkpoint.", "Use one of them.")
    if recipe is None and overrides:
        raise UserError(f"'{overrides[0]}' changes a recipe, and --recipe is missing.", "Set --recipe, or leave it out.")
    if recipe is not None:
        if run_gpus is not None:
            raise UserError("--recipe and --run-gpus both set the GPUs of a run.", "Use one of them.")
        run_gpus, bytes_, planned_step, retained = _of_recipe(recipe, overrides or [], gpu)
        step = planned_step if step is None else step
        checkpoints = retained if checkpoints is None else checkpoints
    else:
        bytes_ = size(state, "--state") if state is not None else state_bytes(open_model(model or MODEL), "bf16")
    found = fleets.plan_cluster(
        gpus,
        bytes_,
        STEP_S if step is None else step,
        run_gpus,
        choose("fleet", fleet, FLEETS),
        replace(
            USUAL,
            detect_s=USUAL.detect_s if detect is None else detect,
            repair_s=USUAL.repair_s if repair is None else repair * HOUR,
        ),
        fleets.Watched(scrape, retention),
        fleets.Stored(
            stalled,
            save,
            fleets.Stored.checkpoints if checkpoints is None else checkpoints,
            None if storage is None else size(storage, "--storage"),
        ),
    )
    answer(lambda _: [_table(found), _line(found)], lambda: jsonable(found), json, explain, found.worksheet)


def _of_recipe(recipe: str, overrides: list[str], gpu: str) -> tuple[int, float, float, int]:
    """GPUs of a run, bytes of its checkpoint, seconds of its step and the checkpoints that it retains."""
    from strata.planner.cli.plan import planned
    from strata.planner.plan import state_bytes
    from strata.platform import recipe_file

    read = recipe_file.load(recipe, overrides)
    if read.parallel.device != "gpu":
        raise UserError(f"The recipe {recipe} trains on {read.parallel.device}.", "Use a recipe with parallel.device: gpu.")
    plan = planned({"precision": None}, overrides, recipe, None, gpu, None, None, None, None, None, None, None)
    return plan.layout.gpus, state_bytes(plan.shape, plan.layout.precision), plan.step.seconds, read.train.keep


def _table(plan: "ClusterPlan") -> RenderableType:
    from strata.planner.cli.tables import grid

    lines = plan.worksheet
    monitoring, storage, failures = (
        _part(plan, title) for title in ("monitoring", "checkpoint storage", "failures of the fleet")
    )
    control = _part(plan, "control planes")
    table = grid(f"a fleet of {plan.gpus:,} GPUs", ["", "", ""])
    rows = (
        ("runs", f"{plan.runs:,}", f"of {plan.run_gpus:,} GPUs; {failures['nodes_beside_runs']:,.0f} nodes beside them"),
        (
            "Ray clusters",
            f"{plan.ray_clusters:,}",
            f"at most {lines['ray_nodes']:,.0f} nodes and {lines['ray_actors']:,.0f} actors each",
        ),
        (
            "head of a run",
            f"{plan.head_cpus} CPUs",
            f"{show(plan.head_bytes, 'B')} of memory; worker nodes: {control['nodes_per_cluster']:,.0f}",
        ),
        (
            "Kubernetes clusters",
            f"{plan.kubernetes_clusters:,}",
            f"at most {control['kubernetes_nodes']:,.0f} nodes each; {control['lease_writes_per_s']:,.0f} lease writes/s",
        ),
        (
            "Prometheus shards",
            f"{plan.shards:,}",
            f"{plan.series:,.0f} series, {plan.samples_per_s:,.0f} samples/s in all",
        ),
        (
            "· of each",
            show(plan.shard_memory_bytes, "B"),
            f"memory; {show(plan.shard_disk_bytes, 'B')} disk for {show(monitoring['retention_s'], 's')};"
            f" senders of remote write: {plan.remote_write_senders}",
        ),
        (
            "checkpoint storage",
            show(plan.storage_bytes, "B"),
            f"{storage['checkpoints']:.0f} + 1 checkpoints of {show(plan.state_bytes, 'B')} per run",
        ),
        (
            "· bandwidth",
            show(plan.storage_bandwidth, "B/s"),
            f"a save every {show(storage['young_s'], 's')} (Young) may stall {share(storage['stalled'])} of the time and last"
            f" {show(storage['longest_save_s'], 's')}; {show(storage['mean_bandwidth'], 'B/s')} on average",
        ),
        ("failures per day", f"{plan.failures_per_day:.3g}", f"{plan.replaced_nodes_per_day:.3g} need another node"),
        (
            "spare nodes",
            f"{plan.spares:,}",
            f"shared by all runs ({failures['separate_spares']:,.0f} if not shared); {plan.nodes_to_add:,} to add to the fleet",
        ),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _line(plan: "ClusterPlan") -> str:
    best = plan.failures.best
    return (
        f"a run: MTBF {show(plan.failures.mtbf_s, 's')}; best checkpoint interval {show(best.interval_s, 's')} ({best.mode});"
        f" goodput {share(plan.goodput)}"
    )


def _part(plan: "ClusterPlan", title: str) -> "dict[str, float]":
    [part] = [part for part in plan.worksheet.parts if part.title == title]
    return {line.name: line.value for line in part.lines}
