"""Ranges around the forward pass of each layer. A layer that runs during the backward pass is recomputed."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from strata.training.model.llama import Embedding, Head, Layer
from strata.training.parallel.pipeline import StageHead
from strata.training.profile.ranges import Ranges

NUMBER = re.compile(r"(\d+)$")


def layer_name(path: str, module: nn.Module) -> str | None:
    """Name of a module's range, None for a module without one. `path` is its name in the engine's module; a pipeline's modules
    are numbered, and the embedding is the first."""
    if isinstance(module, Layer):
        match = NUMBER.search(path)
        assert match
        return f"layer {int(match[1]) - (path == match[1])}"
    if isinstance(module, Head | StageHead):
        return "head"
    if isinstance(module, Embedding):
        return "embedding"
    return "layer " + match[1] if (match := re.search(r"transformer_blocks\.(\d+)$", path)) else None


@contextmanager
def named(module: nn.Module, ranges: Ranges) -> Iterator[None]:
    """Wraps calls from outside: hooks would be compiled with the layer, and a change of them would compile it again."""
    before: list[tuple[nn.Module, Any]] = []
    for path, part in module.named_modules():
        if name := layer_name(path, part):
            compiled = part._compiled_call_impl
            before.append((part, compiled))
            part._compiled_call_impl = _ranged(compiled or part._call_impl, name, ranges)
    try:
        yield
    finally:
        for part, compiled in before:
            part._compiled_call_impl = compiled


def _ranged(call: Callable[..., Any], name: str, ranges: Ranges) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with ranges.range(name):
            return call(*args, **kwargs)

    return run
