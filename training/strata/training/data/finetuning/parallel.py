"""Rendering of many inputs: by Ray Data on a cluster, by a pool of processes, or one after another.

Each input has a folder of its own, so the result does not depend on the order. If several inputs have errors, the first in their
order is raised.
"""

import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np

from strata.platform.errors import UserError
from strata.platform.files import home
from strata.platform.processes import environment
from strata.platform.ray_cluster import cluster
from strata.training.data.finetuning.rendered import Job, render

Progress = Callable[[int, int], None]

RAY_LEAST_INPUTS = 8
POOL_LEAST_BYTES = 64 << 20  # below, starting processes takes longer than rendering
MOST_PROCESSES = 8


def render_all(jobs: Sequence[Job], progress: Progress) -> None:
    """Renders every input that is not cached. `progress` receives the number of finished inputs and of all."""
    progress(0, len(jobs))
    if sum(not job.folder.is_dir() for job in jobs) >= RAY_LEAST_INPUTS and (_is_connected() or cluster.is_given()):
        with nullcontext() if _is_connected() else cluster.connected(cpus=1):
            if _has_free_cpu():
                _with_ray(jobs, progress)
                return
    processes = min(os.cpu_count() or 1, len(jobs), MOST_PROCESSES)
    if processes > 1 and sum(job.source.size for job in jobs) >= POOL_LEAST_BYTES:
        _with_processes(jobs, progress, processes)
    else:
        for done, job in enumerate(jobs, 1):
            render(job)
            progress(done, len(jobs))


def _is_connected() -> bool:
    """True if this process is connected to a Ray cluster. Imports nothing: Ray is loaded where it is used."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _has_free_cpu() -> bool:
    """False on a cluster whose CPUs are all in use, where tasks would wait for another run's end."""
    import ray

    return cluster.grows() or ray.available_resources().get("CPU", 0) >= 1


def _with_ray(jobs: Sequence[Job], progress: Progress) -> None:
    """One task per input. The workers share the cache folder with this process, as they share runs and checkpoints."""
    import ray.data

    items = [{"number": number, "job": pickle.dumps(job), "home": str(home())} for number, job in enumerate(jobs)]
    results = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(_render_batch, batch_size=1)
    errors: dict[int, UserError] = {}
    for done, row in enumerate(results.iter_rows(), 1):
        if row["cause"]:
            errors[int(row["number"])] = UserError(row["cause"], row["fix"])
        progress(done, len(jobs))
    if errors:
        raise errors[min(errors)]


def _render_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """Renders the inputs of a batch. Returns errors instead of raising them, so that the others are rendered and cached."""
    found: dict[str, list[Any]] = {"number": [], "cause": [], "fix": []}
    for number, job, folder in zip(batch["number"], batch["job"], batch["home"], strict=True):
        cause = fix = ""
        try:
            with environment({"STRATA_HOME": str(folder)}):
                render(pickle.loads(job))
        except UserError as error:
            cause, fix = error.cause, error.fix
        found["number"].append(int(number))
        found["cause"].append(cause)
        found["fix"].append(fix)
    return {"number": np.array(found["number"]), **{key: np.array(found[key], object) for key in ("cause", "fix")}}


def _with_processes(jobs: Sequence[Job], progress: Progress, processes: int) -> None:
    """A pool that starts processes anew: a fork would copy the locks of this process's threads."""
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_start)
    try:
        for done, _ in enumerate(pool.map(render, jobs), 1):
            progress(done, len(jobs))
    except BaseException as error:
        for process in list((pool._processes or {}).values()):
            process.kill()  # the others may be in the middle of a large input; what they have finished is cached
        if isinstance(error, BrokenProcessPool):
            cause = "A process that renders examples was killed, perhaps for lack of memory."
            raise UserError(cause, "Free memory and start again: rendered inputs are cached.") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    """Prepares a process of the pool: one thread for the tokenizer, and an end together with the process that started it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
