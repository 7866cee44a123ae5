"""When nothing fits: by how much the leanest layout misses, and what would make it fit."""

from collections.abc import Iterator

from strata.planner.layout import Layout, Offload
from strata.planner.search.best_first import Hunt
from strata.planner.search.space import Line, pipelines, share_out, slices
from strata.planner.units import show
from strata.platform.errors import UserError

DOUBLINGS = 12  # of the number of GPUs, until one gives up


def nothing_fits(hunt: Hunt, gpus: int) -> UserError:
    shape, gpu = hunt.desk.shape, hunt.desk.gpu
    found = leanest(hunt, gpus, "none")
    if found is None:
        refuses = hunt.limits.refuses
        why = refuses(shape, Layout(precision=hunt.desk.precision), hunt.desk.sequence) if refuses else None
        cause = f"There is no layout of {shape.name} on {gpus:,} GPUs for a batch of {hunt.batch.sequences:,} sequences."
        return UserError(f"{cause} {why}" if why else cause, "Change the model." if why else "Change the batch.")
    peak, layout = found
    cause = (
        f"{shape.name} does not fit on {gpus:,} {gpu.name} of {show(hunt.memory, 'B')}: the leanest layout"
        f" (tensor {layout.tensor}, pipeline {layout.pipeline}, ZeRO {layout.zero}, {layout.recompute} recompute)"
        f" needs {show(peak, 'B')}, {show(peak - hunt.memory, 'B')} too much."
    )
    ways = [*_more_gpus(hunt, gpus), *_offload(hunt, gpus)]
    return UserError(cause, "It would fit " + " or ".join(ways) + "." if ways else "Make the model or the sequences smaller.")


def _more_gpus(hunt: Hunt, gpus: int) -> Iterator[str]:
    for doublings in range(1, DOUBLINGS):
        found = leanest(hunt, gpus << doublings, "none")
        if found and found[0] <= hunt.memory:
            yield f"on {gpus << doublings:,} GPUs"
            return


def _offload(hunt: Hunt, gpus: int) -> Iterator[str]:
    names: dict[Offload, str] = {"optimizer": "with the optimizer's state", "all": "with all state"}
    for offload, name in names.items():
        found = leanest(hunt, gpus, offload)
        if offload not in hunt.limits.offloads and found and found[0] <= hunt.memory:
            yield f"{name} in the host's memory (offload {offload})"
            return


def leanest(hunt: Hunt, gpus: int, offload: Offload) -> tuple[float, Layout] | None:
    """The peak bytes of the layout that needs the least memory, and the layout."""
    lines = sorted((hunt.room.least(line, 3, offload), number, line) for number, line in enumerate(_lean_lines(hunt, gpus)))
    best: tuple[float, Layout] | None = None
    for least, _, line in lines:
        if best and least > best[0]:
            break
        for zero in hunt.limits.zeros:
            layout = hunt.layout(line, zero, offload)
            if hunt.allows(layout) and (best is None or hunt.room.peak(layout) < best[0]):
                best = hunt.room.peak(layout), layout
    return best


def _lean_lines(hunt: Hunt, gpus: int) -> Iterator[Line]:
    """With the smallest micro-batches, and all recomputed that may be."""
    desk, limits, batch = hunt.desk, hunt.limits, hunt.batch
    ways = [way for way in pipelines(desk.shape.layers, limits) if way.schedule == "1f1b"]
    for slice in slices(desk.shape, desk.sequence, desk.gpu.domain, gpus, batch.sequences, limits):
        for way in ways if slice.micro_batch == 1 else ():
            if shared := share_out(batch, slice, way, gpus):
                yield Line(slice, way, limits.recomputes[-1], *shared)
