"""Compiles what calls would launch, many at a time, before anybody waits for them."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from strata.kernels.compiler.compilation import recording


def compile_ahead(runs: Iterable[Callable[[], Any]]) -> int:
    """Every kernel that `runs` would launch is compiled and loaded, and none launched: what they compute is left undefined.
    Returns how many there were that this process did not have yet. What does not compile, or asks for more than the device has,
    is left to its first launch to report. Not beside other threads that launch kernels: theirs would be lost."""
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
