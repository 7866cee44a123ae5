"""Blocks and head of a transformer as CUDA graphs: small models are bound by the launches of their kernels, not by the GPU."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from strata.serving.diffusion.families import Modulation, Rows, Tokens

R = TypeVar("R", bound=Rows)
MOST = 4  # graphs of one model; each has the activations of its shape in the pool that they share
Forward = Callable[[Tokens, Modulation], Tensor]


@dataclass(frozen=True)
class Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor


class CudaGraphs:
    """Graphs of one model by the shapes of their inputs. The least recently used one makes way for a new one."""

    def __init__(self) -> None:
        self._recorded: dict[Any, Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, forward: Forward, tokens: Tokens, modulation: Modulation) -> Tensor:
        """`forward(tokens, modulation)`. The first call of a shape runs it, which compiles what is to be compiled, and records
        it; later ones replay it."""
        # A tensor of a graph has memory of its own for each element, and compiled blocks have guards on strides.
        tokens, modulation = changed(tokens, Tensor.contiguous), changed(modulation, Tensor.contiguous)
        key = (signature(tokens), signature(modulation))
        if (recorded := self._recorded.pop(key, None)) is None:
            output = forward(tokens, modulation)
            while len(self._recorded) >= MOST:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[key] = self._record(forward, tokens, modulation)
            return output
        self._recorded[key] = recorded
        torch._foreach_copy_(recorded.inputs, [*leaves(tokens), *leaves(modulation)])
        recorded.graph.replay()
        return recorded.output.clone()  # the next replay writes over it

    def _record(self, forward: Forward, tokens: Tokens, modulation: Modulation) -> Recorded:
        tokens, modulation = changed(tokens, Tensor.clone), changed(modulation, Tensor.clone)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = forward(tokens, modulation)
        return Recorded(graph, [*leaves(tokens), *leaves(modulation)], output)


def leaves(rows: Rows) -> list[Tensor]:
    """All tensors of a set, those of rotary embeddings too, in a fixed order."""
    found: list[Tensor] = []
    for value in (getattr(rows, f.name) for f in fields(rows)):
        found += [value] if isinstance(value, Tensor) else list(value or ())
    return found


def signature(rows: Rows) -> tuple[Any, ...]:
    """Equal for sets whose tensors may take each other's place in a graph."""

    def shape(value: Any) -> Any:
        return (value.shape, value.dtype) if isinstance(value, Tensor) else tuple(map(shape, value or ()))

    return tuple(shape(getattr(rows, f.name)) for f in fields(rows))


def changed(rows: R, change: Callable[[Tensor], Tensor]) -> R:
    """The same set with other tensors."""

    def new(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        return None if value is None else tuple(map(new, value))

    return type(rows)(**{f.name: new(getattr(rows, f.name)) for f in fields(rows)})
