"""How quick a layout can be at best, worked out without playing its pipeline.

A search has hundreds of thousands of layouts, and time to play a few hundred. One that is slower than another even at best
need not be played.
"""

from dataclasses import replace
from operator import mul
from typing import NamedTuple

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.collectives.cost import links
from strata.planner.layout import Recompute, TrainingPrecision
from strata.planner.search.critical_paths import Chain, chains, deal
from strata.planner.search.space import Line, Pipeline, Slice, layout_of
from strata.planner.step import communication as talk
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

Triple = tuple[float, float, float]  # of a dense layer, of a sparse one, and of the head


class Units(NamedTuple):
    """Seconds of one micro-batch: forwards, backwards, for the weights' gradients, and what of a pass a pair of them covers."""

    forward: Triple
    backward: Triple
    weight: Triple
    hidden: Triple


class Gathered(NamedTuple):
    """Seconds that peers talk for every micro-batch, in its forward pass and in its backward pass (ZeRO-2 and 3)."""

    forward: float
    backward: float


class Desk:
    """All that is worked out once for many layouts of one model on one kind of machine."""

    def __init__(
        self, shape: Shape, gpu: Gpu, fabric: Fabric, software: Software, sequence: int, precision: TrainingPrecision
    ) -> None:
        self.shape, self.gpu, self.fabric, self.software = shape, gpu, fabric, software
        self.sequence, self.precision = sequence, precision
        # Exchanges depend on how many GPUs there are only below a domain's, where all of a layout is in one.
        self._ground = Ground(gpu.domain, gpu.domain, links(gpu, fabric, launch=0.0))
        self._width = 4 if precision == "fp32" else 2
        self._memory_rate = gpu.bandwidth * STREAMED
        self._layers: dict[Cut, Layers] = {}
        self._units: dict[tuple[Slice, Recompute], Units] = {}
        self._chains: dict[tuple[Pipeline, int], tuple[Chain, ...]] = {}
        self._own: dict[tuple[Pipeline, int, int], tuple[float, float]] = {}
        self._sends: dict[tuple[Slice, bool], float] = {}

    def layers(self, cut: Cut) -> Layers:
        if cut not in self._layers:
            self._layers[cut] = layer_times(self.shape, self.gpu, self.software, cut, Worksheet(""))
        return self._layers[cut]

    def least_work(self, slice: Slice, recompute: Recompute, covering: bool) -> tuple[float, float]:
        """Seconds of one micro-batch in any pipeline: of all that GPUs do for it together, and of its way there and back."""
        everything = (self.shape.dense_layers, self.shape.sparse_layers, 1)
        forward, backward, weight, hidden = (_dot(unit, everything) for unit in self.units(slice, recompute))
        way = forward + backward - 2 * hidden * covering
        return way + weight, way

    def least_pipeline(self, line: Line, gathered: Gathered | None = None) -> float:
        """Seconds that all micro-batches take at least."""
        slice, pipeline, recompute, data, micro_batches = line
        units = self.units(slice, recompute)
        added = self._added(slice, pipeline)
        each = (*units.forward, *units.backward, *units.weight, *units.hidden, added, self.send(slice, data))
        found = self._chains.get((pipeline, micro_batches))
        if found is None:
            found = self._chains[pipeline, micro_batches] = chains(self.shape, pipeline, micro_batches)
        least = 0.0
        for chain in found:
            seconds = sum(map(mul, chain.passes, each))
            if gathered and chain.own:
                seconds += chain.turns * self._seen(gathered, units, chain, added * pipeline.chunks)
            least = max(least, seconds)
        return least

    def least_step(self, line: Line, zero: int) -> float:
        """Seconds. What comes on top of the pipeline is counted without what the last bucket or an offload would add."""
        slice, pipeline, recompute, data, _ = line
        own = self.own(slice, pipeline)
        layout = layout_of(line, self.precision, zero)
        reduction = talk.data_exchanges(*own, layout, self._width, self.software, self._ground)
        gathered = Gathered(talk.total(reduction.every_forward), talk.total(reduction.every_backward)) if zero > 1 else None
        reduce, gather = talk.total(reduction.reduce), talk.total(reduction.gather)
        if self.software.overlaps_data and (reduce or gather):
            units, middle = self.units(slice, recompute), deal(self.shape, pipeline).middle
            backward = _dot(units.backward, middle) + _dot(units.weight, middle) + self._added(slice, pipeline)
            reduce = seen_beside(reduce, pipeline.chunks * backward)
            gather = seen_beside(gather, pipeline.chunks * _dot(units.forward, middle))
        peers = data * slice.sequence * slice.context if zero else 1
        updated = own[0] / peers + own[1] / max(1.0, peers / slice.expert)
        return self.least_pipeline(line, gathered) + reduce + gather + updated * ADAM_BYTES / self._memory_rate

    def units(self, slice: Slice, recompute: Recompute) -> Units:
        found = self._units.get((slice, recompute))
        if found is None:
            found = self._units[slice, recompute] = self._work_out_units(slice, recompute)
        return found

    def _work_out_units(self, slice: Slice, recompute: Recompute) -> Units:
        """By what `stages.py` says of three parts: a dense layer, a sparse one, and none but the head."""
        layout = layout_of(Line(slice, Pipeline(3, "1f1b", 1), recompute, 1, 1), self.precision)
        cut = cut_of(layout, self.sequence)
        said = exchanges_of(self.shape, replace(layout, pipeline=1), cut.tokens, (0.0, 0.0), self.software, self._ground)
        dense, sparse, head = works_of(self.layers(cut), [(1, 0), (0, 1), (0, 0)], layout, self.software, self.gpu, said, own=0.0)
        return Units(
            (dense.forward, sparse.forward, head.forward),
            (dense.backward, sparse.backward, head.backward),
            (dense.weight, sparse.weight, head.weight),
            (dense.exchange.total * (1 - HIDDEN_COST), sparse.exchange.total * (1 - HIDDEN_COST), 0.0),
        )

    def own(self, slice: Slice, pipeline: Pipeline) -> tuple[float, float]:
        """Parameters of the fullest GPU: those that all tokens pass through, and experts."""
        key = pipeline, slice.tensor, slice.expert
        if key not in self._own:
            layout = layout_of(Line(slice, pipeline, "none", 1, 1), self.precision)
            self._own[key] = stage_parameters(self.shape, layout, deal(self.shape, pipeline).counts)
        return self._own[key]

    def _added(self, slice: Slice, pipeline: Pipeline) -> float:
        """Seconds in which the gradients of one part of a stage are added to those of micro-batches before."""
        dense, experts = self.own(slice, pipeline)
        return 2 * self.software.gradient_bytes * (dense + experts) / pipeline.chunks / self._memory_rate

    def send(self, slice: Slice, data: int) -> float:
        """Seconds from one stage to the next."""
        apart = data * slice.gpus >= self.gpu.domain
        if (slice, apart) not in self._sends:
            line = Line(slice, Pipeline(2, "1f1b", 1), "none", self.gpu.domain if apart else 1, 1)
            layout = layout_of(line, self.precision)
            tokens = cut_of(layout, self.sequence).tokens
            found = talk.pipeline_exchange(self.shape, layout, tokens, self._width, self._ground)
            self._sends[slice, apart] = found.seconds if found else 0.0
        return self._sends[slice, apart]

    def _seen(self, gathered: Gathered, units: Units, chain: Chain, added: float) -> float:
        """Of what peers say for a micro-batch on one stage. Its parts are taken together, which can only hide more."""
        assert chain.own
        if not self.software.overlaps_data:
            return gathered.forward + gathered.backward
        backward = _dot(units.backward, chain.own) + _dot(units.weight, chain.own) + added
        return seen_beside(gathered.forward, _dot(units.forward, chain.own)) + seen_beside(gathered.backward, backward)


def _dot(units: Triple, content: tuple[int, int, int]) -> float:
    return units[0] * content[0] + units[1] * content[1] + units[2] * content[2]
