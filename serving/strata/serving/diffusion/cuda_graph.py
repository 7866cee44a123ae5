"""Blocks of a transformer as one CUDA graph: a step costs the host one launch instead of thousands.

Small models are bound by the host, not by the GPU. A graph is captured at the first step of every shape; later steps, and later
pictures of that shape, copy their inputs into its buffers and replay it. For one worker: collectives are not captured.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from strata.serving.diffusion.families import Family, Modulation, Tokens
from strata.serving.diffusion.parallel.group import Axis
from strata.serving.diffusion.step_cache import StepCache

Inputs = TypeVar("Inputs", Tokens, Modulation)
WARM_UP_RUNS = 2  # before a capture: compilers and libraries allocate at their first calls


class GraphedBlocks(StepCache):
    """A step cache that skips nothing: it takes the place of the blocks' loop in a sampling call."""

    def __init__(self) -> None:
        super().__init__(threshold=0.0)
        self.captured: dict[tuple[Any, ...], _Captured] = {}

    def begin(self, pictures: int, everyone: Axis) -> None:
        if everyone.size > 1:
            raise ValueError(f"a CUDA graph is for one worker, not {everyone.size}")

    def run(self, family: Family, blocks: list[nn.Module], tokens: Tokens, modulation: Modulation) -> Tokens:
        key = tuple((tuple(x.shape), x.dtype) for x in (*tensors(tokens), *tensors(modulation)))
        if key not in self.captured:
            self.captured[key] = _Captured(family, blocks, tokens, modulation)
        return self.captured[key].replay(tokens, modulation)


class _Captured:
    def __init__(self, family: Family, blocks: list[nn.Module], tokens: Tokens, modulation: Modulation) -> None:
        self.tokens, self.modulation = cloned(tokens), cloned(modulation)

        def compute() -> Tokens:
            found = self.tokens
            for block in blocks:
                found = family.block(block, found, self.modulation)
            return found

        self.launch, self.out = capture(compute)

    def replay(self, tokens: Tokens, modulation: Modulation) -> Tokens:
        for inputs, buffers in ((tokens, self.tokens), (modulation, self.modulation)):
            for given, buffer in zip(tensors(inputs), tensors(buffers), strict=True):
                buffer.copy_(given)
        self.launch()
        return self.out


def capture(compute: Callable[[], Tokens]) -> tuple[Callable[[], None], Tokens]:
    """A launch that repeats `compute`, and the buffers of its result."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    return graph.replay, out


def tensors(inputs: Tokens | Modulation) -> list[Tensor]:
    """All tensors of the inputs, in the order of their fields."""
    found: list[Tensor] = []
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if value is not None:
            found += value if isinstance(value, tuple) else (value,)
    return found


def cloned(inputs: Inputs) -> Inputs:
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    copies: dict[str, Any] = {
        name: tuple(x.clone() for x in value) if isinstance(value, tuple) else value.clone()
        for name, value in values.items()
        if value is not None
    }
    return replace(inputs, **copies)
