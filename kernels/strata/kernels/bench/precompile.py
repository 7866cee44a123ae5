"""Compiles all kernels of a benchmark in parallel processes before anything is timed.

Compilation takes most of a benchmark's time and does not affect its result. Triton and Inductor both cache compiled code on disk.
Errors are ignored here; the benchmark itself reports them.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

LEAST_CORES = 4  # with fewer, processes would only wait for each other
LONGEST = 180.0  # seconds; remaining kernels compile when they are first run


def precompile(ops: Sequence[str], quick: bool) -> None:
    from strata.kernels.bench.selection import select

    cores, count = os.cpu_count() or 1, len(select(ops, quick))
    if cores < LEAST_CORES or count < 2:
        return
    pool = ProcessPoolExecutor(min(count, cores - 2), mp_context=get_context("spawn"))
    try:
        with suppress(BrokenProcessPool, TimeoutError):
            list(pool.map(partial(_run_once, ops, quick), range(count), timeout=LONGEST))
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()  # peers may be slow to exit, and no other process may use the GPU during timing
        pool.shutdown(cancel_futures=True)


def _run_once(ops: Sequence[str], quick: bool, number: int) -> None:
    """Runs every contender of case `number` once."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # by default, each process would start one thread per core
    import torch

    from strata.kernels.bench.case import Missing
    from strata.kernels.bench.selection import select

    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere), suppress(Exception):
        torch._dynamo.reset()
        for contender in select(ops, quick)[number].build(torch.device("cuda")).contenders.values():
            if not isinstance(contender, Missing):
                with suppress(Exception):
                    contender()
    torch.cuda.empty_cache()
