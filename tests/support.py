"""Helpers for tests of several packages: the command line, a recipe small enough for tests, and a served endpoint."""

import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from strata.platform import ports
from strata.serving import client

ROOT = Path(__file__).parents[1]
STRATA = str(Path(sys.executable).parent / "strata")
KUBECTL = str(Path(sys.executable).parent / "kubectl")  # installed by `make setup`, maybe not on PATH

# The laptop recipe, smaller: about a minute on two cores, mostly process starts.
TINY = [
    "model.layers=2",
    "model.hidden=128",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=256",
    "model.vocab=1024",
    "model.context=256",
    "train.steps=30",
    "train.time_budget_s=3600",  # a busy machine must not shorten it
    "train.warmup=5",
    "train.lr=1.0e-3",  # 30 steps need other rates than a whole run
    "train.embedding_lr_ratio=20",
    "train.schedule=cosine",
    "train.batch=8",
    "train.micro_batch=4",
    "train.eval_every=10",
    "train.eval_sequences=8",
    "train.checkpoint_every=10",
]


def starts_fast(*command: str) -> bool:
    """True if a command starts fast: its CPU time relative to the imports that every command line needs.

    The machine's speed changes from second to second, so the two are measured in pairs, and most of seven pairs decide.
    """
    libraries = (sys.executable, "-c", "import typer.rich_utils, rich.markdown, pydantic.dataclasses, psutil, yaml")
    verdicts = {True: 0, False: 0}
    while max(verdicts.values()) < 4:
        verdicts[_cpu_seconds(*command) < 2.5 * _cpu_seconds(*libraries)] += 1
    return verdicts[True] == 4


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Asserts a limit on the CPU time of the block.

    The limit holds for a machine that runs the loop below in 0.1 s, and scales with that loop on slower or busier machines.
    """
    gc.collect()
    gc.freeze()  # objects of earlier tests are not scanned
    try:
        before, began = _python_loop(), time.process_time()
        yield
        took = time.process_time() - began
        slower = max(1.0, max(before, _python_loop()) / 0.1)
    finally:
        gc.unfreeze()
    assert took < seconds * slower, f"{took:.2f} s where {seconds:.2f} s are allowed, on a machine {slower:.2f} times slower"


def _python_loop() -> float:
    began = time.process_time()
    found: dict[int, int] = {}
    for number in range(600_000):
        found[number % 1000] = found.get(number % 997, 0) + number
    return time.process_time() - began


def _cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"COLUMNS": "140"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@dataclass(frozen=True)
class Served:
    url: str
    model: str
    folder: Path
    process: psutil.Process
    command: subprocess.Popen[bytes]
    output: Path
    port: ports.Reservation  # reserved until the process ends, also during a restart

    def wait_until_ready(self, limit_s: float = 300) -> None:
        try:
            client.wait_until_ready(self.url, self.command, limit_s)
        except client.NotReady as error:
            raise AssertionError(f"{error.cause}\n{self.output.read_text()}") from None


def start_serving(home: Path, folder: Path, *words: str) -> tuple[Served, subprocess.Popen[bytes]]:
    held = ports.reserve()
    output = home / f"serve-{held.port}.out"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [STRATA, "serve", "--run", "tiny", f"serve.port={held.port}", *words],
            env=os.environ | {"STRATA_HOME": str(home)},
            stdout=stream,
            stderr=stream,
        )
    return Served(held.url, "tiny", folder, psutil.Process(process.pid), process, output, held), process


def prefill_header(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-strata-prefill"]
