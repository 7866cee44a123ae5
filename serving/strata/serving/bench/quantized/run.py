"""Runs one contender after another, each in a process of its own, and writes the comparison."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strata.platform import benchmark_record, processes
from strata.platform.files import cache_dir, write_atomic
from strata.serving.bench.quantized.contenders import BASE, OURS, PEERS, Contender
from strata.serving.bench.quantized.measure import Load, Order
from strata.serving.bench.quantized.model import Shape

LIMIT_S = 900.0  # of one contender
KERNEL = re.compile(r"(?:Using|Selected) (\w+Kernel) for")  # in vLLM's log
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Measured:
    ready_s: float
    rates: dict[int, tuple[float, ...]]  # tokens per second of each round, by concurrency
    kernels: tuple[str, ...]  # that vLLM chose

    def __str__(self) -> str:
        return ", ".join((f"ready after {self.ready_s:.0f} s", *self.kernels))


Outcome = Measured | str  # or the reason why a contender was not measured


def bench(contenders: Sequence[Contender], shape: Shape, load: Load, path: Path, console: Console) -> bool:
    """Returns whether every contender that this machine can run was measured."""
    gpu = bool(benchmark_record.gpus())
    found: dict[str, Outcome] = {}
    failed = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for contender in contenders:
        if reason := contender.obstacle(gpu):
            found[contender.name] = f"skipped: {reason}"
        else:
            with console.status(f"{contender.name} …"):
                found[contender.name] = _measure(contender, shape, load)
            failed |= isinstance(found[contender.name], str)
        console.print(f"{contender.name}: {found[contender.name]}", markup=False)
        write_atomic(path, json.dumps(as_json(shape, load, found), indent=2))  # later contenders may be interrupted
    record = as_json(shape, load, found)
    console.print(table(record))
    write_atomic(path, json.dumps(record, indent=2))
    console.print(f"written to {path}")
    return not failed


def _measure(contender: Contender, shape: Shape, load: Load) -> Outcome:
    log = cache_dir() / "bench" / "logs" / f"quantized-{contender.name}.log"
    log.unlink(missing_ok=True)
    environment = os.environ | ENVIRONMENT | contender.environment
    folder = cache_dir() / "bench" / "quantized" / contender.name  # the same each time: vLLM's cache of compiled code knows it
    result_file = folder / "result.json"
    result_file.unlink(missing_ok=True)
    order = Order(contender.name, shape, load, str(folder / "model"), str(result_file))
    command = [sys.executable, "-m", "strata.serving.bench.quantized.measure", order.as_json()]
    with processes.started(command, log, environment) as process:
        try:
            code = process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"failed: no result within {LIMIT_S:.0f} s; see {log}"
        finally:
            processes.stop_family([process])
    if code != 0 or not result_file.is_file():
        return f"failed with code {code}; see {log}\n{processes.last_lines(log)}"
    result = json.loads(result_file.read_text())
    rates = {int(level): tuple(each) for level, each in result["rates"].items()}
    return Measured(result["ready_s"], rates, tuple(sorted(set(KERNEL.findall(log.read_text(errors="replace"))))))


def as_json(shape: Shape, load: Load, found: Mapping[str, Outcome]) -> dict[str, Any]:
    medians = {
        name: {level: statistics.median(each.rates[level]) for level in load.concurrency}
        for name, each in found.items()
        if isinstance(each, Measured)
    }

    def ratios(of: Mapping[int, float], to: Mapping[int, float] | None) -> dict[int, float] | None:
        return {level: of[level] / to[level] for level in load.concurrency} if to else None

    peers = [medians[name] for name in PEERS if name in medians]
    best = {level: max(peer[level] for peer in peers) for level in load.concurrency} if peers else None
    return {
        **benchmark_record.header("quantized"),
        "shape": asdict(shape),
        "load": asdict(load),
        "contenders": {
            name: each
            if isinstance(each, str)
            else {
                "ready_s": each.ready_s,
                "kernels": each.kernels,
                "rounds": each.rates,
                "decode_tokens_per_s": medians[name],
                "ratio_to_bf16": ratios(medians[name], medians.get(BASE)),
                "ratio_to_best_of_vllm": ratios(medians[name], best) if name == OURS else None,
            }
            for name, each in found.items()
        },
    }


def table(record: dict[str, Any]) -> Table:
    made = Table("weights", "at once", "decode tokens/s", "to bf16", "to vLLM's best", box=None, header_style="bold")
    for name, each in record["contenders"].items():
        if isinstance(each, str):
            continue
        for level in record["load"]["concurrency"]:
            ratios = (_ratio(each[key], level) for key in ("ratio_to_bf16", "ratio_to_best_of_vllm"))
            made.add_row(name, str(level), f"{each['decode_tokens_per_s'][level]:,.0f}", *ratios)
    return made


def _ratio(ratios: Mapping[int, float] | None, level: int) -> str:
    return f"{ratios[level]:.2f}" if ratios else ""
