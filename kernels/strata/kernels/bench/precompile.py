"""Compiles what a benchmark will run, in many processes, before anything is timed.

Compiling is most of a benchmark's time and none of its result; Triton and Inductor both keep what they compiled on disk. Errors
are left for the benchmark itself to meet and to report.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path

LEAST_CORES = 4  # below, processes would only wait for each other
LONGEST = 180.0  # seconds; the rest compiles when its turn comes


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
            process.kill()  # rather than wait for what peers do when they end; and nobody is to share the GPU with what is timed
        pool.shutdown(cancel_futures=True)


def _run_once(ops: Sequence[str], quick: bool, number: int) -> None:
    """Every contender of the case with that number."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # each process would start as many as there are cores
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
