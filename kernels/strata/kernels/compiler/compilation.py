"""A kernel and its launch arguments: all that the compiler needs, for any architecture, without a GPU.

Instead of repeating signatures, `launched` calls operations with meta tensors and records the launches. The compiled kernels are
therefore those that run on a GPU, including alignment and constants.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strata.kernels.ladder.cuda_source import CudaSource
from strata.kernels.tuning.tunable import Key, Tunable, compiling_for

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]  # the kernel, positional arguments, keywords


@dataclass(frozen=True)
class Compilation:
    """`arguments` are placeholders by parameter name: tensors (`device="meta"` is enough), numbers, tensor descriptors,
    constants. `options` are compiler options: num_warps, num_stages, maxnreg. The kernel may be Triton's or Gluon's."""

    name: str
    kernel: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def constants(self) -> dict[str, Any]:
        names = [parameter.name for parameter in self.kernel.params if parameter.is_constexpr]
        return {name: self.arguments[name] for name in names if name in self.arguments}


@dataclass(frozen=True)
class CudaCompilation:
    """A kernel in CUDA C++. Its constants are in its source, so none can be overridden."""

    source: CudaSource

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def constants(self) -> dict[str, Any]:
        return {}


def launched(run: Callable[[], Any], label: str = "") -> list[Compilation]:
    """Kernels that `run` would launch, each once. `label` distinguishes variants of one kernel, as in `causal: forward_kernel`.
    `run` calls operations, or their launch functions, with tensors on `device="meta"`."""
    with recording() as launches, DispatchToCuda():
        run()
    found: dict[str, Compilation] = {}
    for kernel, args, kwargs in launches:
        name = f"{label}: {kernel.__name__}" if label else kernel.__name__
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        arguments = {parameter: value for parameter, value in given.items() if parameter in kernel.arg_names}
        options = {option: value for option, value in given.items() if option not in kernel.arg_names}
        found.setdefault(name, Compilation(name, kernel, arguments, options))
    return list(found.values())


class DispatchToCuda(TorchDispatchMode):
    """Dispatches Strata's operations to their CUDA implementation for any tensors, so that their launch functions are called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace != "strata":
            return func(*args, **(kwargs or {}))
        with self:  # operations may call other operations
            return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **(kwargs or {}))


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Records launches, in every thread, instead of running them."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((kernel, args, kwargs))

    launch = JITFunction.run
    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = launch


@contextmanager
def assume_architecture(arch: int, changes: Mapping[str, int]) -> Iterator[set[str]]:
    """Treats meta and CPU tensors as tensors of an `arch` GPU, and overrides the settings in `changes` of every tunable that has
    them. Yields the names of all settings of the tunables that were looked up."""
    settings: set[str] = set()

    def arguments(self: Tunable, key: Key, device: torch.device) -> dict[str, int]:
        known = self.config(key, arch).arguments()
        settings.update(known)
        return known | {name: value for name, value in changes.items() if name in known}

    chosen, token = Tunable.arguments, compiling_for.set(arch)
    Tunable.arguments = arguments  # type: ignore[method-assign]
    try:
        yield settings
    finally:
        Tunable.arguments = chosen  # type: ignore[method-assign]
        compiling_for.reset(token)
