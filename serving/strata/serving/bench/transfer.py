"""How fast one engine reads another's blocks, both on this machine: NIXL between two processes, without the engines.

Two things decide it: what UCX takes for the way, and into how many pieces a prompt's blocks fall. So every number of pieces is
tried with UCX as it comes and as our engines are started. Posting is what a decode engine's streams wait for; the rest goes on
beside them.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strata.platform import benchmark_record
from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.recipe import Device
from strata.serving.spec import READ_BY_CUDA

LIMIT_S = 120.0
AS_IT_COMES = "UCX as it comes"
WAYS = {AS_IT_COMES: {}, "as our engines are started": {READ_BY_CUDA: "on"}}
FULL = 7  # what every byte of the blocks that are read is


@dataclass(frozen=True)
class Task:
    device: Device
    size: int  # bytes
    pieces: int
    repeats: int

    @property
    def piece(self) -> int:
        return self.size // self.pieces

    @property
    def span(self) -> int:
        """Twice as much, of which every other piece counts: neighbours would be read as one."""
        return 2 * self.pieces * self.piece


@dataclass(frozen=True)
class Reading:
    """Of the quickest repeat; the first pays for connecting."""

    first_s: float
    post_s: float
    total_s: float


def bench(device: Device, size: int, pieces: Sequence[int], repeats: int, path: Path, console: Console) -> None:
    table = Table(box=None, header_style="bold")
    table.add_column(f"{size >> 20} MiB between two processes, {device.upper()} memory")
    for column in ("pieces", "first ms", "best ms", "of it posting", "GB/s"):
        table.add_column(column, justify="right")
    ways = WAYS if device == "gpu" else {AS_IT_COMES: WAYS[AS_IT_COMES]}
    readings: dict[str, dict[int, Any]] = {}
    for way, environment in ways.items():
        for count in pieces:
            with console.status(f"{way}, {count} pieces"):
                reading = _in_processes_of_their_own(Task(device, size, count, repeats), environment)
            readings.setdefault(way, {})[count] = asdict(reading)
            milliseconds = [1000 * seconds for seconds in (reading.first_s, reading.total_s, reading.post_s)]
            table.add_row(way, str(count), *(f"{value:.2f}" for value in milliseconds), f"{size / reading.total_s / 1e9:.1f}")
    console.print(table)
    result = {**benchmark_record.header(), "device": device, "bytes": size, "readings": readings}
    write_atomic(path, json.dumps(result, indent=2))
    console.print(f"written to {path}")


def _in_processes_of_their_own(task: Task, environment: dict[str, str]) -> Reading:
    """UCX reads its settings once, when it is loaded."""
    inherited = {name: value for name, value in os.environ.items() if name != READ_BY_CUDA}
    command = [sys.executable, "-m", "strata.serving.bench.transfer", json.dumps(asdict(task))]
    try:
        done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{task.pieces} pieces were not read within {LIMIT_S:.0f} s.", "Read less at once: --mib.") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"NIXL could not read {task.pieces} pieces: {last}", "See 'strata doctor', or try --device cpu.")
    return Reading(**json.loads(done.stdout.splitlines()[-1]))


class _Agent:
    """NIXL's, with the memory it may read or give."""

    def __init__(self, name: str, task: Task) -> None:
        import torch
        from nixl._api import nixl_agent, nixl_agent_config

        self.task, self.kind = task, "VRAM" if task.device == "gpu" else "DRAM"
        device = "cuda" if task.device == "gpu" else "cpu"
        self.memory = torch.zeros(task.span, dtype=torch.uint8, device=device)
        self.nixl = nixl_agent(name, nixl_agent_config(num_threads=4))  # as many as vLLM has it use
        self.nixl.register_memory(self.nixl.get_reg_descs([(self.memory.data_ptr(), task.span, 0, "")], self.kind))

    def fill(self, value: int) -> None:
        import torch

        self.memory.fill_(value)
        if self.memory.is_cuda:
            torch.cuda.synchronize()

    def pieces_at(self, base: int) -> Any:
        steps = range(self.task.pieces)
        return self.nixl.get_xfer_descs([(base + 2 * step * self.task.piece, self.task.piece, 0) for step in steps], self.kind)


def _own(task: Task, pipe: Connection) -> None:
    agent = _Agent("owner", task)
    agent.fill(FULL)
    pipe.send((agent.nixl.get_agent_metadata(), agent.memory.data_ptr()))
    pipe.recv()


def _read(task: Task, pipe: Connection) -> Reading:
    agent = _Agent("reader", task)
    agent.fill(0)
    introduction, base = pipe.recv()
    owner = agent.nixl.add_remote_agent(introduction)
    here = agent.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", agent.pieces_at(agent.memory.data_ptr()))
    there = agent.nixl.prep_xfer_dlist(owner, agent.pieces_at(base))
    everything = list(range(task.pieces))
    times = []
    for _ in range(task.repeats):
        began = time.perf_counter()
        handle = agent.nixl.make_prepped_xfer("READ", here, everything, there, everything, b"read")
        state = agent.nixl.transfer(handle)
        posted = time.perf_counter()
        while state == "PROC":
            time.sleep(1e-4)
            state = agent.nixl.check_xfer_state(handle)
        times.append((time.perf_counter() - began, posted - began))
        agent.nixl.release_xfer_handle(handle)
        if state != "DONE":
            raise SystemExit(f"the transfer ended as {state}")
    read = agent.memory.view(task.pieces, 2, task.piece)
    if not bool((read[:, 0] == FULL).all()) or bool(read[:, 1].any()):
        raise SystemExit("what was read is not what was there")
    total, post = min(times)
    return Reading(times[0][0], post, total)


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own, args=(task, theirs), daemon=True)
    owner.start()
    theirs.close()  # else nobody would hear of an owner that ends early
    try:
        print(json.dumps(asdict(_read(task, ours))), flush=True)
    finally:
        owner.kill()


if __name__ == "__main__":
    main()
