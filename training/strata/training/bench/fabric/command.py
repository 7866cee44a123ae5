"""`strata bench fabric`. Light imports only: `strata --help` loads this module."""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform import recipe_file
from strata.platform.recipe_file import Overrides

LARGEST = {"gpu": "1GiB", "cpu": "4MiB"}


def bench_fabric(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name or path, for its workers and device.")] = recipe_file.DEFAULT,
    processes: Annotated[
        int | None, typer.Option(help="Processes of this machine over gloo, instead of a Ray cluster.", min=2, max=64)
    ] = None,
    share: Annotated[float, typer.Option(help="A node is slow below this share of the others' median.", min=0.05, max=1.0)] = 0.7,
    rounds: Annotated[int, typer.Option(help="Partners of each node, at most.", min=2)] = 8,
    size: Annotated[str | None, typer.Option(help="Largest buffer, such as 256MiB. Default: 1GiB on GPUs, 4MiB on CPUs.")] = None,
    fabric: Annotated[str | None, typer.Option(help="Network to compare with, by its name in 'strata plan list'.")] = None,
    json: Annotated[Path | None, typer.Option(help="Output file. Default: bench/fabric.json in the cache folder.")] = None,
) -> None:
    """Measure all-reduces on a run's Ray cluster, compare them with the plan, and name slow nodes.

    Exits with 1 if a node is slow. Without a Ray cluster, a recipe for CPUs is measured between processes of this machine."""
    from strata.platform.errors import UserError
    from strata.platform.hardware import catalogue
    from strata.platform.ray_cluster import cluster
    from strata.training.bench.fabric import judgement

    chosen = recipe_file.load(recipe, overrides or ()).parallel
    if fabric is not None:
        catalogue.fabric(fabric)  # refuses unknown ones
    if processes is None and chosen.workers < 2:
        raise UserError("parallel.workers=1: one worker has no network.", "Set parallel.workers, or --processes.")
    gpus = processes is None and chosen.device == "gpu"
    sizes = judgement.sizes_up_to(size or LARGEST["gpu" if gpus else "cpu"])
    settings = judgement.Settings(sizes, rounds, share, fabric, json)
    if processes is not None or not (gpus or cluster.is_given()):
        slow = judgement.on_this_machine(processes or chosen.workers, settings)
    else:
        slow = judgement.on_ray(chosen, settings)
    if slow:
        raise typer.Exit(1)
