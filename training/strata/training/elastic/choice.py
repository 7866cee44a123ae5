"""Selection of a layout for the workers that a cluster has capacity for."""

from collections.abc import Iterator

from strata.planner.cli.options import open_fabric
from strata.planner.recipes import planned_peak, planned_seconds
from strata.platform.hardware.specs import Gpu
from strata.platform.layout_rules import FixedLayout, resized
from strata.platform.recipe import ModelSection, ParallelSection, Recipe, TrainSection, WorkerCount
from strata.training.layout import distance, workable_layouts


def choose(
    model: ModelSection, train: TrainSection, parallel: ParallelSection, capacity: int, gpu: Gpu | None = None
) -> FixedLayout | None:
    """The nearest layout of a range that runs on up to `capacity` workers, None if none does.

    Other numbers of data-parallel replicas are nearest, then fewer pipeline stages, then any other dimensions. Among layouts that
    are equally near, the planner's step time decides on a known GPU, otherwise the number of workers. Layouts that do not fit in
    the GPU's memory by plan are used only if no other layout is left."""
    sizes = [size for size in parallel.workers.sizes() if size <= capacity]
    too_large: list[FixedLayout] = []
    for candidates in _by_nearness(model, train, parallel, sizes):
        fitting = [layout for layout in candidates if _fits(model, layout, gpu)]
        if fitting:
            return min(fitting, key=lambda layout: _rank(model, parallel, layout, gpu))
        too_large += candidates
    return too_large[0] if too_large else None


def _by_nearness(
    model: ModelSection, train: TrainSection, parallel: ParallelSection, sizes: list[int]
) -> Iterator[list[FixedLayout]]:
    yield _resized(model, train, parallel, sizes)
    fewer = [stages for stages in range(parallel.pipeline - 1, 0, -1) if parallel.pipeline % stages == 0]
    shorter = [_with_stages(parallel, stages) for stages in fewer]
    yield [layout for like in shorter for layout in _resized(model, train, like, sizes)]
    # Micro-batches of one sequence here: `resized` selects the largest that divides the batch.
    smallest = train.model_copy(update={"micro_batch": 1})
    for size in sizes:
        others = workable_layouts(model, smallest, parallel.model_copy(update={"workers": WorkerCount(size)}))
        yield [layout for like in others for layout in _resized(model, train, like, [size])]


def _resized(model: ModelSection, train: TrainSection, like: ParallelSection, sizes: list[int]) -> list[FixedLayout]:
    return [layout for size in sizes if (layout := resized(model, train, like, size))]


def _with_stages(parallel: ParallelSection, stages: int) -> ParallelSection:
    schedule = parallel.schedule if stages > 1 else "1f1b"
    return parallel.model_copy(update={"pipeline": stages, "schedule": schedule})


def _fits(model: ModelSection, layout: FixedLayout, gpu: Gpu | None) -> bool:
    return gpu is None or planned_peak(_recipe(model, layout)) <= gpu.memory


def _rank(model: ModelSection, like: ParallelSection, layout: FixedLayout, gpu: Gpu | None) -> tuple[float, int, float]:
    seconds = planned_seconds(_recipe(model, layout), gpu, open_fabric(None, gpu)) if gpu else 0.0
    return seconds, -layout.parallel.workers, distance(like, layout.parallel)


def _recipe(model: ModelSection, layout: FixedLayout) -> Recipe:
    return Recipe(model=model, train=layout.train, parallel=layout.parallel)
