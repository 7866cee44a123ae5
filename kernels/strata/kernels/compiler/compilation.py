"""A kernel and what it would be launched with: all that the compiler needs, for any architecture, without a GPU.

Rather than writing signatures down a second time, `launched` calls operations with tensors that have no storage and notes what a
GPU would have been given. So what is compiled here is what runs there, alignment and constants included.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strata.kernels.tuning.tunable import Key, Tunable, compiling_for

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]  # the kernel, positional arguments, keywords


@dataclass(frozen=True)
class Compilation:
    """`arguments` are stand-ins by the kernel's parameter names: tensors (`device="meta"` will do), numbers, tensor descriptors,
    constants. `options` are the compiler's: num_warps, num_stages, maxnreg. The kernel may be Triton's or Gluon's."""

    name: str
    kernel: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def constants(self) -> dict[str, Any]:
        names = [parameter.name for parameter in self.kernel.params if parameter.is_constexpr]
        return {name: self.arguments[name] for name in names if name in self.arguments}


def launched(run: Callable[[], Any], label: str = "") -> list[Compilation]:
    """What `run` would launch, each kernel once; `label` tells variants of one kernel apart, as in `causal: forward_kernel`.
    `run` calls operations, or their launch functions, with tensors that are `device="meta"`."""
    with recording() as launches, AsOnGpu():
        run()
    found: dict[str, Compilation] = {}
    for kernel, args, kwargs in launches:
        name = f"{label}: {kernel.__name__}" if label else kernel.__name__
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        arguments = {parameter: value for parameter, value in given.items() if parameter in kernel.arg_names}
        options = {option: value for option, value in given.items() if option not in kernel.arg_names}
        found.setdefault(name, Compilation(name, kernel, arguments, options))
    return list(found.values())


class AsOnGpu(TorchDispatchMode):
    """Our operations take the way they take on a GPU, whatever tensors they are given: their launch functions are called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace != "strata":
            return func(*args, **(kwargs or {}))
        with self:  # for operations that call others
            return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **(kwargs or {}))


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, launches are noted and not done, in every thread."""
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
def pretending(arch: int, changes: Mapping[str, int]) -> Iterator[set[str]]:
    """Inside, meta and CPU tensors count as an `arch` GPU's, and every tunable's configuration has `changes` made to it, where it
    has such a setting. Yields the names of the settings that were there to be changed."""
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
