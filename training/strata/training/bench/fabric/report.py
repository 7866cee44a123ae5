"""Tables and JSON of a measured fabric, beside the planner's model of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from strata.planner.collectives import cost
from strata.planner.collectives.patterns import Place as Ranks
from strata.planner.units import show
from strata.platform import benchmark_record
from strata.platform.hardware import catalogue
from strata.platform.hardware.specs import Gpu
from strata.training.bench.fabric.analysis import Measurement, Path, Verdict
from strata.training.bench.fabric.member import Place

GB = 1e9


@dataclass(frozen=True)
class Planned:
    """Seconds of an all-reduce over all nodes by size, in the planner's model of a GPU and a fabric."""

    gpu: str
    fabric: str
    seconds: Mapping[int, float]


def plan(measured: Measurement, device: str | None, fabric: str | None) -> Planned | None:
    """None on CPUs and for GPUs that are not in the catalogue."""
    from strata.planner.cli.options import open_fabric

    gpu = catalogue.device_named(device) if device else None
    if not isinstance(gpu, Gpu):
        return None
    chosen = open_fabric(fabric, gpu)
    nodes = len(measured.names)
    links, ranks = cost.links(gpu, chosen), Ranks(len(measured.nodes) // nodes, nodes)
    return Planned(gpu.name, chosen.name, {size: cost.cost("all_reduce", size, ranks, links).seconds for size in measured.world})


def world_table(measured: Measurement, planned: Planned | None) -> Table:
    ranks = len(measured.nodes)
    title = f"all-reduce over {len(measured.names)} nodes, {ranks} ranks"
    caption = f"planned: {planned.gpu} with {planned.fabric}" if planned else None
    table = Table(title=title, caption=caption, caption_justify="left", box=None, header_style="bold")
    for column in ("size", "time", "bus GB/s", *(("planned", "measured / planned") if planned else ())):
        table.add_column(column, justify="right")
    for size, seconds in measured.world.items():
        bus = size * cost.bus_factor("all_reduce", ranks) / seconds
        row = [show(size, "B"), show(seconds, "s"), f"{bus / GB:,.2f}"]
        if planned:
            row += [show(planned.seconds[size], "s"), f"{seconds / planned.seconds[size]:.2f}"]
        table.add_row(*row)
    return table


def node_table(found: Sequence[Verdict], least: float) -> Table:
    inside = any(one.inside is not None for one in found)
    table = Table(title=f"nodes, slow below {least:.0%} of the others' median", box=None, header_style="bold")
    table.add_column("node")
    for column in (*(("inside GB/s", "of others") if inside else ()), "between GB/s", "of others"):
        table.add_column(column, justify="right")
    table.add_column("")
    for one in found:
        row = [one.node]
        if inside:
            row += [_rate(one.inside), _share(one.inside_share)]
        row += [_rate(one.between), _share(one.between_share)]
        ranks = f", ranks {', '.join(map(str, one.ranks))}" if one.ranks else ""
        table.add_row(*row, f"[bold red]slow{ranks}[/]" if one.slow else "")
    return table


def notes(measured: Measurement, paths: Sequence[Path], places: Sequence[Place], on_gpus: bool) -> list[RenderableType]:
    found: list[RenderableType] = [
        f"slow path between {path.nodes[0]} (rank {path.ranks[0]}) and {path.nodes[1]} (rank {path.ranks[1]}): "
        f"{path.share:.0%} of the usual rate"
        for path in paths[:8]
    ]
    if len(measured.names) == 2:
        found.append("Two nodes have a single pair, which cannot show which of them is slow.")
    limits = {node: place.lockable for node, place in zip(measured.nodes, places, strict=True) if place.lockable is not None}
    if limits and on_gpus:
        node, limit = next(iter(limits.items()))
        found.append(
            f"{len(limits)} nodes limit locked memory ({show(limit, 'B')} on {node}): NCCL cannot register buffers for RDMA, and "
            "may use TCP. Set LimitMEMLOCK=infinity for the nodes' container runtime."
        )
    return found


def record(
    measured: Measurement, planned: Planned | None, found: Sequence[Verdict], paths: Sequence[Path], least: float
) -> dict[str, Any]:
    ranks = len(measured.nodes)
    sizes = [
        {
            "bytes": size,
            "seconds": seconds,
            "busbw": size * cost.bus_factor("all_reduce", ranks) / seconds,
            "planned_seconds": planned.seconds[size] if planned else None,
        }
        for size, seconds in measured.world.items()
    ]
    return {
        **benchmark_record.header("fabric"),
        "nodes": len(measured.names),
        "ranks": ranks,
        "planned": {"gpu": planned.gpu, "fabric": planned.fabric} if planned else None,
        "all_reduce": sizes,
        "least_share": least,
        "verdicts": [asdict(one) for one in found],
        "slow_paths": [asdict(path) for path in paths],
        "exchanges": [{"ranks": one.ranks, "bytes": measured.size, "seconds": one.seconds} for one in measured.exchanges],
    }


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / GB:,.2f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
