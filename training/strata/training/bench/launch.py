"""Starts a contender's processes, follows them to their end, and writes each one's output to its own log file."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from strata.platform import ports, processes
from strata.training.bench.contest import OURS, Job
from strata.training.bench.ours import prepare_home, run_metrics
from strata.training.memory import KEEP_FREED_MEMORY
from strata.training.metrics import records
from strata.training.metrics.records import Follower, Record

POLL_S = 0.2
RANK = re.compile(r"^\[rank\d+\]:")  # torch's prefix of each traceback line
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt): |error: ")
Process = subprocess.Popen[bytes]


class Failed(Exception):
    """Raised with the reason why a contender did not finish."""


def run(job: Job, with_ray: bool, logs: Path, step: Callable[[int], None], under: tuple[str, ...] = ()) -> list[Record]:
    """Runs a job and returns its records. Calls `step` with the number of each finished step. `under`: words before the command
    of each rank, such as a profiler's; not with Ray."""
    with ports.reserve() as rendezvous:  # reserved to the end: rank 0 binds the port seconds after it was chosen
        return _run(job, with_ray, logs, step, rendezvous.port, under)


def _run(job: Job, with_ray: bool, logs: Path, step: Callable[[int], None], port: int, under: tuple[str, ...]) -> list[Record]:
    threads = {"OMP_NUM_THREADS": str(job.recipe.parallel.cpus_per_worker)}
    if job.contender in OURS and with_ray:
        metrics = run_metrics(job)
        commands = [(prepare_home(job), {"STRATA_HOME": str(job.folder)})]
    else:
        metrics = job.metrics
        command = [*under, sys.executable, "-m", "strata.training.bench.peer", job.model_dump_json()]
        ours = KEEP_FREED_MEMORY if job.contender in OURS and job.recipe.parallel.device == "cpu" else {}
        commands = [(command, threads | ours | group) for group in _process_group(job.recipe.parallel.workers, port)]
    files = [logs / f"{job.contender}-{number}.log" for number in range(len(commands))]
    with _started(commands, files) as workers:
        follower = Follower(metrics)
        running = True
        while running:
            codes = [process.poll() for process in workers]
            running = None in codes
            for code, file in zip(codes, files, strict=True):
                if code:  # the other ranks would wait for this process forever
                    raise Failed(f"{_error_line(file)} (see {file})")
            for record in follower.new():
                step(record["step"])
            time.sleep(POLL_S)
    return records.read(metrics)


def _process_group(workers: int, port: int) -> list[dict[str, str]]:
    """Environment variables of torch.distributed, for each rank."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    return [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]


@contextmanager
def _started(commands: list[tuple[list[str], dict[str, str]]], files: list[Path]) -> Iterator[list[Process]]:
    workers = []
    try:
        for (command, environment), file in zip(commands, files, strict=True):
            with file.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env=os.environ | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=processes.ending_with_us(),
                )
            workers.append(process)
        yield workers
    finally:
        processes.stop_family(workers)


def _error_line(log: Path) -> str:
    """Last line that names an error, since libraries keep logging after it; otherwise the last line."""
    lines = [RANK.sub("", line).strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if ERROR.match(line)]
    return (errors or [line for line in lines if line] or ["it exited without output"])[-1]
