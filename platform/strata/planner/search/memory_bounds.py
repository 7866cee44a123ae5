"""Whether a layout fits: exactly (`memory/plan.py`), and before that whether it can at all.

Most of what a search could look at does not fit by far. The state and the activations of the first stage's layers alone say so,
in a fiftieth of the time.
"""

from typing import NamedTuple

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.layout import Layout, Offload, Recompute, TrainingPrecision
from strata.planner.memory.activations import keeping_of, layer_parts
from strata.planner.memory.buffers import CUDA_CONTEXT, GAPS
from strata.planner.memory.plan import peak_bytes
from strata.planner.pipeline.schedules import in_flight
from strata.planner.search.critical_paths import deal
from strata.planner.search.space import Line, Pipeline, Slice, layout_of


class First(NamedTuple):
    """What the first stage of a pipeline has: dense and sparse layers, and parameters, experts apart."""

    dense: int
    sparse: int
    parameters: int
    experts: int


class Room:
    def __init__(self, shape: Shape, software: Software, sequence: int, precision: TrainingPrecision) -> None:
        self._shape, self._sequence, self._precision = shape, sequence, precision
        self._keeping = keeping_of(software)
        self._kept: dict[tuple[Slice, Recompute], tuple[float, float]] = {}
        self._first: dict[Pipeline, First] = {}
        # Bytes of a parameter's weight, gradient and optimizer state, at least.
        self._widths = (4, 4, 8) if precision == "fp32" else (2, 2, 12)

    def peak(self, layout: Layout) -> float:
        return peak_bytes(self._shape, layout, self._keeping, self._sequence)

    def least(self, line: Line, zero: int, offload: Offload) -> float:
        """Bytes of the first stage's state and activations, without what comes and goes beside them."""
        slice, pipeline, recompute, data, micro_batches = line
        dense, sparse, parameters, experts = self._first.get(pipeline) or self._deal(pipeline)
        peers = data * slice.sequence * slice.context
        whole, shared = self._state(zero, offload)
        state = parameters * (whole + shared / peers) + experts * (whole / slice.expert + shared / max(peers, slice.expert))
        dense_kept, sparse_kept = self.kept(slice, recompute)
        held = in_flight(pipeline.schedule, pipeline.stages, micro_batches, pipeline.chunks)
        kept = held * (dense * dense_kept + sparse * sparse_kept)
        return state / slice.tensor + (1 + GAPS) * kept + CUDA_CONTEXT

    def least_state(self, zero: int, offload: Offload, gpus: int) -> float:
        """Bytes of state of the mean GPU, however the model is cut."""
        return self._shape.parameters() * sum(self._state(zero, offload)) / gpus

    def _state(self, zero: int, offload: Offload) -> tuple[int, int]:
        """Bytes of a parameter that every GPU with it has on its own, and that they share out."""
        weight, gradient, optimizer = self._widths
        if offload != "none":
            optimizer, gradient = 0, gradient if zero < 2 else 0
        if offload == "all":
            weight = 0
        shared = optimizer * (zero >= 1) + gradient * (zero >= 2) + weight * (zero >= 3)
        return weight + gradient + optimizer - shared, shared

    def kept(self, slice: Slice, recompute: Recompute) -> tuple[float, float]:
        """Bytes that a dense and a sparse layer keep of a micro-batch."""
        found = self._kept.get((slice, recompute))
        if found is None:
            layout = layout_of(Line(slice, Pipeline(1, "1f1b", 1), recompute, 1, 1), self._precision)
            dense, sparse = (
                layer_parts(self._shape, layout, self._keeping, sparse, self._sequence).total if exists else 0.0
                for sparse, exists in ((False, self._shape.dense_layers), (True, self._shape.sparse_layers))
            )
            found = self._kept[slice, recompute] = dense, sparse
        return found

    def _deal(self, pipeline: Pipeline) -> First:
        shape = self._shape
        dense, sparse, _ = deal(shape, pipeline).stages[0].own
        parameters = shape.layers_parameters(dense, sparse) + shape.table_parameters()
        self._first[pipeline] = First(dense, sparse, parameters, shape.routed_parameters(sparse))
        return self._first[pipeline]
