"""Ranks of a job as plain processes, without Ray. They are forked from a server that has already imported torch, DeepSpeed and
the modules of an engine, so that eight of them start in a second."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from strata.training.checkpoint import format, resharding
from strata.training.checkpoint.storage import folder
from strata.training.loop import Job, Worker
from strata.training.parallel import optimizer_state

CONTEXT = multiprocessing.get_context("forkserver")
LATE = [
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "pyarrow.fs",
    "strata.kernels.ops.linear_cross_entropy.linear_cross_entropy",
]
# Each process imports the main module again, which is pytest.
CONTEXT.set_forkserver_preload(["deepspeed", "strata.training.loop", "pytest", __name__, *LATE])


@dataclass(frozen=True)
class Trained:
    """Losses of `steps` + `more` steps, and of the last `more` steps repeated from two checkpoints: another layout's and its
    own."""

    losses: list[float]
    from_other: list[float]
    from_own: list[float]
    val_loss: float
    samples: list[list[int]]  # continuations by the initial state, which has more to write than a model of a few steps


def train(job: Job, steps: int, more: int, other: Path, own: Path) -> Trained:
    """Trains a job. An engine without any steps first resumes from `other`. Then it loads its initial state, which is saved in
    `own`/start, and trains; `own`/end is the checkpoint after `steps`."""
    results: list[Trained] = on_ranks(job.parallel.workers, train_on_this_rank, job, steps, more, other, own)
    assert len(set(map(str, results))) == 1, "all ranks report the same losses"
    return results[0]


def train_on_this_rank(job: Job, steps: int, more: int, other: Path, own: Path) -> Trained:
    worker = Worker(job)

    def save(to: Path, step: int) -> None:
        parts = [replace(p, values=p.values.cpu()) for p in optimizer_state.fragments(worker.engine, job.model, job.parallel)]
        format.write(folder(to), worker.rank, worker.world, step, job.origin, None, parts)
        dist.barrier()

    def load(source: Path) -> None:
        found = format.examine(folder(source))
        optimizer_state.load(worker.engine, job.model, job.parallel, resharding.Reader(found), found.step)

    def take(first: int, count: int) -> list[float]:
        return [worker.step(step)[0] for step in range(first, first + count)]

    save(own / "start", 0)
    load(other)
    from_other = take(steps, more)
    load(own / "start")
    losses = take(0, steps)
    save(own / "end", steps)
    val_loss = worker.evaluate()
    losses += take(steps, more)
    load(own / "end")
    from_own = take(steps, more)
    load(own / "start")
    samples = worker.continuations(job.prompts) if job.prompts else []
    return Trained(losses, from_other, from_own, val_loss, samples)


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # as in a Ray worker with one CPU; torch reads it on import
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as rendezvous:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_rank, args=(rank, world, f"{rendezvous}/store", theirs, function, arguments))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = _answers(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return answers


def _answers(pipes: list[Connection]) -> list[Any]:
    """Results of all ranks. After a failure the other ranks, which wait for the failed one, have 5 seconds to fail too."""
    answers: dict[Connection, Any] = {}
    errors: list[str] = []
    while len(answers) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in answers], 5 if errors else None)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            ok, answers[pipe] = pipe.recv()
            errors += [] if ok else [answers[pipe]]
        if errors and not ready:
            break
    assert not errors, "\n".join(sorted(errors, key=lambda error: "gloo" in error))  # the cause first
    return [answers[pipe] for pipe in pipes]


def _rank(rank: int, world: int, store: str, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.nice(10)  # tests of the endpoint, which run beside these, have deadlines
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
