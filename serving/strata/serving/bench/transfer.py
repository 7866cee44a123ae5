"""Benchmarks KV transfer on one machine: NIXL reads between two processes, without engines.

The speed depends on UCX's choice of transport and on the number of memory fragments of a prompt's blocks. Each number of
fragments is measured with UCX's defaults and with the settings of Strata's engines. Posting a transfer blocks the streams of a
decode engine. The rest runs concurrently with them.
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
DEFAULTS, ENGINE = "UCX as it comes", "as our engines are started"  # keys in the JSON file
LABELS = {DEFAULTS: "UCX defaults", ENGINE: "engine settings"}
SETTINGS = {DEFAULTS: {}, ENGINE: {READ_BY_CUDA: "on"}}
FULL = 7  # value of every byte to be read


@dataclass(frozen=True)
class Task:
    device: Device
    size: int  # bytes
    fragments: int
    repeats: int

    @property
    def fragment(self) -> int:
        return self.size // self.fragments

    @property
    def span(self) -> int:
        """Twice the size: only every other fragment is read, because NIXL would merge neighbours."""
        return 2 * self.fragments * self.fragment


@dataclass(frozen=True)
class Reading:
    """Times of the fastest repeat, and of the first, which includes connecting."""

    first_s: float
    post_s: float
    total_s: float


def bench(device: Device, size: int, fragments: Sequence[int], repeats: int, path: Path, console: Console) -> None:
    table = Table(box=None, header_style="bold")
    table.add_column(f"{size >> 20} MiB between two processes, {device.upper()} memory")
    for column in ("fragments", "first ms", "best ms", "posting ms", "GB/s"):
        table.add_column(column, justify="right")
    chosen = SETTINGS if device == "gpu" else {DEFAULTS: SETTINGS[DEFAULTS]}
    readings: dict[str, dict[int, Any]] = {}
    for name, environment in chosen.items():
        for count in fragments:
            with console.status(f"{LABELS[name]}, {count} fragments"):
                reading = _in_subprocess(Task(device, size, count, repeats), environment)
            readings.setdefault(name, {})[count] = asdict(reading)
            milliseconds = [1000 * seconds for seconds in (reading.first_s, reading.total_s, reading.post_s)]
            table.add_row(
                LABELS[name], str(count), *(f"{value:.2f}" for value in milliseconds), f"{size / reading.total_s / 1e9:.1f}"
            )
    console.print(table)
    write_atomic(path, json.dumps(as_json(device, size, readings), indent=2))
    console.print(f"written to {path}")


def as_json(device: Device, size: int, readings: dict[str, dict[int, Any]]) -> dict[str, Any]:
    return {**benchmark_record.header("transfer"), "device": device, "bytes": size, "readings": readings}


def _in_subprocess(task: Task, environment: dict[str, str]) -> Reading:
    """Runs in a new process, because UCX reads its settings only when it is loaded."""
    inherited = {name: value for name, value in os.environ.items() if name != READ_BY_CUDA}
    command = [sys.executable, "-m", "strata.serving.bench.transfer", json.dumps(asdict(task))]
    try:
        done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"NIXL did not read {task.fragments} fragments within {LIMIT_S:.0f} s.", "Read less: --mib.") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        raise UserError(f"NIXL could not read {task.fragments} fragments: {last}", "See 'strata doctor', or try --device cpu.")
    return Reading(**json.loads(done.stdout.splitlines()[-1]))


class _Agent:
    """A NIXL agent with registered memory."""

    def __init__(self, name: str, task: Task) -> None:
        import torch
        from nixl._api import nixl_agent, nixl_agent_config

        self.task, self.kind = task, "VRAM" if task.device == "gpu" else "DRAM"
        device = "cuda" if task.device == "gpu" else "cpu"
        self.memory = torch.zeros(task.span, dtype=torch.uint8, device=device)
        self.nixl = nixl_agent(name, nixl_agent_config(num_threads=4))  # as in vLLM
        self.nixl.register_memory(self.nixl.get_reg_descs([(self.memory.data_ptr(), task.span, 0, "")], self.kind))

    def fill(self, value: int) -> None:
        import torch

        self.memory.fill_(value)
        if self.memory.is_cuda:
            torch.cuda.synchronize()

    def fragments_at(self, base: int) -> Any:
        steps = range(self.task.fragments)
        return self.nixl.get_xfer_descs(
            [(base + 2 * step * self.task.fragment, self.task.fragment, 0) for step in steps], self.kind
        )


def _own(task: Task, pipe: Connection) -> None:
    agent = _Agent("owner", task)
    agent.fill(FULL)
    pipe.send((agent.nixl.get_agent_metadata(), agent.memory.data_ptr()))
    pipe.recv()


def _read(task: Task, pipe: Connection) -> Reading:
    agent = _Agent("reader", task)
    agent.fill(0)
    metadata, base = pipe.recv()
    owner = agent.nixl.add_remote_agent(metadata)
    here = agent.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", agent.fragments_at(agent.memory.data_ptr()))
    there = agent.nixl.prep_xfer_dlist(owner, agent.fragments_at(base))
    everything = list(range(task.fragments))
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
    read = agent.memory.view(task.fragments, 2, task.fragment)
    if not bool((read[:, 0] == FULL).all()) or bool(read[:, 1].any()):
        raise SystemExit("the bytes read differ from the source")
    total, post = min(times)
    return Reading(times[0][0], post, total)


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own, args=(task, theirs), daemon=True)
    owner.start()
    theirs.close()  # otherwise the pipe stays open when the owner ends early
    try:
        print(json.dumps(asdict(_read(task, ours))), flush=True)
    finally:
        owner.kill()


if __name__ == "__main__":
    main()
