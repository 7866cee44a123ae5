"""Lower bounds on a layout's step time, without simulating its pipeline.

A search space has hundreds of thousands of layouts, and a search has time to simulate a few hundred. A layout whose lower bound
exceeds another layout's step time need not be simulated.
"""

from dataclasses import replace
from operator import mul
from typing import NamedTuple

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.collectives.cost import links
from strata.planner.layout import Recompute, TrainingPrecision
from strata.planner.search.critical_paths import CriticalPath, critical_paths, partition
from strata.planner.search.space import Family, Pipeline, Slice, layout_of
from strata.planner.step import communication
from strata.planner.step.communication import Ground
from strata.planner.step.compute import STREAMED, Cut
from strata.planner.step.stages import (
    HIDDEN_COST,
    Layers,
    cut_of,
    exchanges_of,
    layer_times,
    seen_beside,
    stage_parameters,
    works_of,
)
from strata.planner.step.step import ADAM_BYTES
from strata.planner.worksheet import Worksheet
from strata.platform.hardware.specs import Fabric, Gpu

Triple = tuple[float, float, float]  # dense layer, sparse layer, head


class Units(NamedTuple):
    """Seconds of one micro-batch: forward, input-gradient and weight-gradient passes, and the part that overlap hides."""

    forward: Triple
    backward: Triple
    weight: Triple
    hidden: Triple


class Gathered(NamedTuple):
    """Seconds of data-parallel communication per micro-batch, in the forward and in the backward pass (ZeRO-2 and 3)."""

    forward: float
    backward: float


class TimeBounds:
    """Lower bounds for layouts of one model on one kind of machine. Caches the terms that many layouts have in common."""

    def __init__(
        self, shape: Shape, gpu: Gpu, fabric: Fabric, software: Software, sequence: int, precision: TrainingPrecision
    ) -> None:
        self.shape, self.gpu, self.fabric, self.software = shape, gpu, fabric, software
        self.sequence, self.precision = sequence, precision
        # Communication depends on the GPU count only below the size of a domain, where a layout is in one domain.
        self._ground = Ground(gpu.domain, gpu.domain, links(gpu, fabric, launch=0.0))
        self._width = 4 if precision == "fp32" else 2
        self._memory_rate = gpu.bandwidth * STREAMED
        self._layers: dict[Cut, Layers] = {}
        self._units: dict[tuple[Slice, Recompute], Units] = {}
        self._paths: dict[tuple[Pipeline, int], tuple[CriticalPath, ...]] = {}
        self._own: dict[tuple[Pipeline, int, int], tuple[float, float]] = {}
        self._sends: dict[tuple[Slice, bool], float] = {}

    def layers(self, cut: Cut) -> Layers:
        if cut not in self._layers:
            self._layers[cut] = layer_times(self.shape, self.gpu, self.software, cut, Worksheet(""))
        return self._layers[cut]

    def least_work(self, slice: Slice, recompute: Recompute, overlapping: bool) -> tuple[float, float]:
        """Seconds of one micro-batch in any pipeline: the sum over all GPUs, and its forward and backward pass."""
        everything = (self.shape.dense_layers, self.shape.sparse_layers, 1)
        forward, backward, weight, hidden = (_dot(unit, everything) for unit in self.units(slice, recompute))
        round_trip = forward + backward - 2 * hidden * overlapping
        return round_trip + weight, round_trip

    def least_pipeline(self, family: Family, gathered: Gathered | None = None) -> float:
        """Lower bound on the seconds of all micro-batches."""
        slice, pipeline, recompute, data, micro_batches = family
        units = self.units(slice, recompute)
        added = self._added(slice, pipeline)
        each = (*units.forward, *units.backward, *units.weight, *units.hidden, added, self.send(slice, data))
        found = self._paths.get((pipeline, micro_batches))
        if found is None:
            found = self._paths[pipeline, micro_batches] = critical_paths(self.shape, pipeline, micro_batches)
        least = 0.0
        for path in found:
            seconds = sum(map(mul, path.passes, each))
            if gathered and path.own:
                seconds += path.micro_batches * self._exposed(gathered, units, path, added * pipeline.chunks)
            least = max(least, seconds)
        return least

    def least_step(self, family: Family, zero: int) -> float:
        """Lower bound on the seconds of a step. Omits the last gradient bucket and offloading."""
        slice, pipeline, recompute, data, _ = family
        own = self.own(slice, pipeline)
        layout = layout_of(family, self.precision, zero)
        reduction = communication.data_exchanges(*own, layout, self._width, self.software, self._ground)
        gathered = (
            Gathered(communication.total(reduction.every_forward), communication.total(reduction.every_backward))
            if zero > 1
            else None
        )
        reduce, gather = communication.total(reduction.reduce), communication.total(reduction.gather)
        if self.software.overlaps_data and (reduce or gather):
            units, middle = self.units(slice, recompute), partition(self.shape, pipeline).middle
            backward = _dot(units.backward, middle) + _dot(units.weight, middle) + self._added(slice, pipeline)
            reduce = seen_beside(reduce, pipeline.chunks * backward)
            gather = seen_beside(gather, pipeline.chunks * _dot(units.forward, middle))
        peers = data * slice.sequence * slice.context if zero else 1
        updated = own[0] / peers + own[1] / max(1.0, peers / slice.expert)
        return self.least_pipeline(family, gathered) + reduce + gather + updated * ADAM_BYTES / self._memory_rate

    def units(self, slice: Slice, recompute: Recompute) -> Units:
        found = self._units.get((slice, recompute))
        if found is None:
            found = self._units[slice, recompute] = self._compute_units(slice, recompute)
        return found

    def _compute_units(self, slice: Slice, recompute: Recompute) -> Units:
        """Compute the units with `stages.py` from three parts: a dense layer, a sparse layer, and the head alone."""
        layout = layout_of(Family(slice, Pipeline(3, "1f1b", 1), recompute, 1, 1), self.precision)
        cut = cut_of(layout, self.sequence)
        exchanges = exchanges_of(self.shape, replace(layout, pipeline=1), cut.tokens, (0.0, 0.0), self.software, self._ground)
        dense, sparse, head = works_of(
            self.layers(cut), [(1, 0), (0, 1), (0, 0)], layout, self.software, self.gpu, exchanges, own=0.0
        )
        return Units(
            (dense.forward, sparse.forward, head.forward),
            (dense.backward, sparse.backward, head.backward),
            (dense.weight, sparse.weight, head.weight),
            (dense.exchange.total * (1 - HIDDEN_COST), sparse.exchange.total * (1 - HIDDEN_COST), 0.0),
        )

    def own(self, slice: Slice, pipeline: Pipeline) -> tuple[float, float]:
        """Parameters of the fullest GPU: without experts, and of experts."""
        key = pipeline, slice.tensor, slice.expert
        if key not in self._own:
            layout = layout_of(Family(slice, pipeline, "none", 1, 1), self.precision)
            self._own[key] = stage_parameters(self.shape, layout, partition(self.shape, pipeline).counts)
        return self._own[key]

    def _added(self, slice: Slice, pipeline: Pipeline) -> float:
        """Seconds of gradient accumulation for one part of a stage."""
        dense, experts = self.own(slice, pipeline)
        return 2 * self.software.gradient_bytes * (dense + experts) / pipeline.chunks / self._memory_rate

    def send(self, slice: Slice, data: int) -> float:
        """Seconds from one stage to the next."""
        apart = data * slice.gpus >= self.gpu.domain
        if (slice, apart) not in self._sends:
            family = Family(slice, Pipeline(2, "1f1b", 1), "none", self.gpu.domain if apart else 1, 1)
            layout = layout_of(family, self.precision)
            tokens = cut_of(layout, self.sequence).tokens
            found = communication.pipeline_exchange(self.shape, layout, tokens, self._width, self._ground)
            self._sends[slice, apart] = found.seconds if found else 0.0
        return self._sends[slice, apart]

    def _exposed(self, gathered: Gathered, units: Units, path: CriticalPath, added: float) -> float:
        """Exposed data-parallel communication of a micro-batch on one stage. Treats its parts together, which can only hide
        more."""
        assert path.own
        if not self.software.overlaps_data:
            return gathered.forward + gathered.backward
        backward = _dot(units.backward, path.own) + _dot(units.weight, path.own) + added
        return seen_beside(gathered.forward, _dot(units.forward, path.own)) + seen_beside(gathered.backward, backward)


def _dot(units: Triple, content: tuple[int, int, int]) -> float:
    return units[0] * content[0] + units[1] * content[1] + units[2] * content[2]
