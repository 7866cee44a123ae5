"""Lower bounds on a layout's memory, and its exact peak (`memory/plan.py`).

Most layouts in the search space exceed the memory by far. The state and activations of the first stage's layers are enough to
reject them, in a fiftieth of the time.
"""

from typing import NamedTuple

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.layout import Layout, Offload, Recompute, TrainingPrecision
from strata.planner.memory.activations import keeping_of, layer_parts
from strata.planner.memory.buffers import CUDA_CONTEXT, GAPS
from strata.planner.memory.plan import peak_bytes
from strata.planner.pipeline.schedules import in_flight
from strata.planner.search.critical_paths import partition
from strata.planner.search.space import Family, Pipeline, Slice, layout_of


class First(NamedTuple):
    """Content of a pipeline's first stage: dense and sparse layers, and parameters without and with experts."""

    dense: int
    sparse: int
    parameters: int
    experts: int


class MemoryBounds:
    def __init__(self, shape: Shape, software: Software, sequence: int, precision: TrainingPrecision) -> None:
        self._shape, self._sequence, self._precision = shape, sequence, precision
        self._keeping = keeping_of(software)
        self._activations: dict[tuple[Slice, Recompute], tuple[float, float]] = {}
        self._first: dict[Pipeline, First] = {}
        # Lower bound on the bytes of a parameter's weight, gradient and optimizer state.
        self._widths = (4, 4, 8) if precision == "fp32" else (2, 2, 12)

    def peak(self, layout: Layout) -> float:
        return peak_bytes(self._shape, layout, self._keeping, self._sequence)

    def least(self, family: Family, zero: int, offload: Offload) -> float:
        """Bytes of the first stage's state and activations, without temporary buffers."""
        slice, pipeline, recompute, data, micro_batches = family
        dense, sparse, parameters, experts = self._first.get(pipeline) or self._first_stage(pipeline)
        peers = data * slice.sequence * slice.context
        whole, shared = self._state(zero, offload)
        state = parameters * (whole + shared / peers) + experts * (whole / slice.expert + shared / max(peers, slice.expert))
        dense_bytes, sparse_bytes = self.layer_activations(slice, recompute)
        held = in_flight(pipeline.schedule, pipeline.stages, micro_batches, pipeline.chunks)
        activations = held * (dense * dense_bytes + sparse * sparse_bytes)
        return state / slice.tensor + (1 + GAPS) * activations + CUDA_CONTEXT

    def least_state(self, zero: int, offload: Offload, gpus: int) -> float:
        """Mean bytes of state per GPU, for any layout."""
        return self._shape.parameters() * sum(self._state(zero, offload)) / gpus

    def _state(self, zero: int, offload: Offload) -> tuple[int, int]:
        """Bytes per parameter that are replicated on every GPU, and bytes that ZeRO shards."""
        weight, gradient, optimizer = self._widths
        if offload != "none":
            optimizer, gradient = 0, gradient if zero < 2 else 0
        if offload == "all":
            weight = 0
        shared = optimizer * (zero >= 1) + gradient * (zero >= 2) + weight * (zero >= 3)
        return weight + gradient + optimizer - shared, shared

    def layer_activations(self, slice: Slice, recompute: Recompute) -> tuple[float, float]:
        """Activation bytes of a micro-batch in a dense and in a sparse layer."""
        found = self._activations.get((slice, recompute))
        if found is None:
            layout = layout_of(Family(slice, Pipeline(1, "1f1b", 1), recompute, 1, 1), self._precision)
            dense, sparse = (
                layer_parts(self._shape, layout, self._keeping, sparse, self._sequence).total if exists else 0.0
                for sparse, exists in ((False, self._shape.dense_layers), (True, self._shape.sparse_layers))
            )
            found = self._activations[slice, recompute] = dense, sparse
        return found

    def _first_stage(self, pipeline: Pipeline) -> First:
        shape = self._shape
        dense, sparse, _ = partition(shape, pipeline).stages[0].own
        parameters = shape.layers_parameters(dense, sparse) + shape.table_parameters()
        self._first[pipeline] = First(dense, sparse, parameters, shape.routed_parameters(sparse))
        return self._first[pipeline]
