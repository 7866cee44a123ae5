"""Error for an infeasible search: the missing memory, and the changes that would make a layout fit."""

from collections.abc import Iterator

from strata.planner.layout import Layout, Offload
from strata.planner.search.best_first import BestFirst
from strata.planner.search.space import Family, divide_batch, pipelines, slices
from strata.planner.units import show
from strata.platform.errors import UserError

DOUBLINGS = 12  # of the GPU count, before the search for a larger cluster stops


def nothing_fits(best_first: BestFirst, gpus: int) -> UserError:
    bounds = best_first.time_bounds
    shape, gpu = bounds.shape, bounds.gpu
    found = smallest(best_first, gpus, "none")
    if found is None:
        refuses = best_first.limits.refuses
        why = refuses(shape, Layout(precision=bounds.precision), bounds.sequence) if refuses else None
        cause = f"There is no layout of {shape.name} on {gpus:,} GPUs for a batch of {best_first.batch.sequences:,} sequences."
        return UserError(f"{cause} {why}" if why else cause, "Change the model." if why else "Change the batch.")
    peak, layout = found
    cause = (
        f"{shape.name} does not fit on {gpus:,} {gpu.name} of {show(best_first.memory, 'B')}: the layout with the least memory"
        f" (tensor {layout.tensor}, pipeline {layout.pipeline}, ZeRO {layout.zero}, {layout.recompute} recompute)"
        f" needs {show(peak, 'B')}, {show(peak - best_first.memory, 'B')} too much."
    )
    remedies = [*_more_gpus(best_first, gpus), *_offload(best_first, gpus)]
    return UserError(
        cause, "It would fit " + " or ".join(remedies) + "." if remedies else "Make the model or the sequences smaller."
    )


def _more_gpus(best_first: BestFirst, gpus: int) -> Iterator[str]:
    for doublings in range(1, DOUBLINGS):
        found = smallest(best_first, gpus << doublings, "none")
        if found and found[0] <= best_first.memory:
            yield f"on {gpus << doublings:,} GPUs"
            return


def _offload(best_first: BestFirst, gpus: int) -> Iterator[str]:
    names: dict[Offload, str] = {"optimizer": "with the optimizer's state", "all": "with all state"}
    for offload, name in names.items():
        found = smallest(best_first, gpus, offload)
        if offload not in best_first.limits.offloads and found and found[0] <= best_first.memory:
            yield f"{name} in the host's memory (offload {offload})"
            return


def smallest(best_first: BestFirst, gpus: int, offload: Offload) -> tuple[float, Layout] | None:
    """Peak bytes of the layout that needs the least memory, and the layout."""
    families = sorted(
        (best_first.memory_bounds.least(family, 3, offload), number, family)
        for number, family in enumerate(_smallest_families(best_first, gpus))
    )
    best: tuple[float, Layout] | None = None
    for least, _, family in families:
        if best and least > best[0]:
            break
        for zero in best_first.limits.zeros:
            layout = best_first.layout(family, zero, offload)
            if best_first.allows(layout) and (best is None or best_first.memory_bounds.peak(layout) < best[0]):
                best = best_first.memory_bounds.peak(layout), layout
    return best


def _smallest_families(best_first: BestFirst, gpus: int) -> Iterator[Family]:
    """Families with micro-batches of one sequence and the most recomputation allowed."""
    bounds, limits, batch = best_first.time_bounds, best_first.limits, best_first.batch
    chosen = [each for each in pipelines(bounds.shape.layers, limits) if each.schedule == "1f1b"]
    for slice in slices(bounds.shape, bounds.sequence, bounds.gpu.domain, gpus, batch.sequences, limits):
        for pipeline in chosen if slice.micro_batch == 1 else ():
            if shared := divide_batch(batch, slice, pipeline, gpus):
                yield Family(slice, pipeline, limits.recomputes[-1], *shared)
