"""Compiles kernels in parallel, ahead of their first launch."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from strata.kernels.compiler.compilation import recording


def compile_ahead(runs: Iterable[Callable[[], Any]]) -> int:
    """Compiles and loads every kernel that `runs` would launch, and launches none, so their outputs are undefined. Returns the
    number of kernels that this process had not loaded. Kernels that fail to compile, or that exceed the device's resources, raise
    at their first launch instead. No other thread may launch kernels meanwhile: its launches would be lost."""
    from triton import AsyncCompileMode

    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True) as compiling:
        for run in runs:
            with recording() as launches, suppress(Exception):
                run()
            for kernel, args, kwargs in launches:
                kernel.warmup(*args, grid=(1,), **kwargs)
    compiled = [one.kernel for one in compiling.future_kernels.values() if one.kernel is not None]
    for one in compiled:
        with suppress(Exception):
            one._init_handles()
    return len(compiled)
