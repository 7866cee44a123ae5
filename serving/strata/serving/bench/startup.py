"""Time to the first answer of `strata serve` and of two bare vLLM servers with the same settings, started side by side.

Rounds alternate and medians are compared, since machines are shared. Both are measured from outside, in the same way: from the
start of the processes to the first completion, which is requested until it is answered. `/ready` is not used here: a bare vLLM
server has none.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from strata.platform import benchmark_record, ports, processes
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.serving import access
from strata.serving.models import choice, model_dir
from strata.serving.spec import EngineSpec, Network, Role
from strata.serving.vllm_patches.nixl_delay import DELAY_US

LIMIT_S = 600.0
Started = tuple[list[subprocess.Popen[bytes]], list[str]]  # the processes, and the addresses to wait for
Starter = Callable[[choice.Choice, contextlib.ExitStack], Started]  # ports are held until the stack is closed
OURS, BARE = "strata serve", "two bare vLLM servers"


def bench(overrides: Sequence[str], run: str | None, model: Path | None, rounds: int, path: Path) -> None:
    chosen = choice.choose(overrides, run, model, None)
    model_dir.check(chosen.folder)
    if chosen.section.device != "cpu":
        raise UserError("This comparison runs on the CPU.", "Use a recipe with serve.device=cpu.")
    if chosen.section.prefill.replicas == 0:
        raise UserError("This comparison needs a prefill engine.", "Set serve.prefill.replicas=1.")
    seconds: dict[str, list[float]] = {OURS: [], BARE: []}
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number in range(rounds):
            for name, start in ((OURS, _start_ours), (BARE, _start_bare)):
                with console.status(f"round {number + 1} of {rounds}: {name}"):
                    seconds[name].append(_time_to_answer(chosen, start))
                console.print(f"round {number + 1}: {name} {seconds[name][-1]:.1f} s")
    except KeyboardInterrupt:
        if all(seconds.values()):
            _report(seconds, console, path, partial=True)
        console.print("Stopped before all rounds were measured.")
        raise typer.Exit(130) from None
    _report(seconds, console, path, partial=False)


def _report(seconds: dict[str, list[float]], console: Console, path: Path, partial: bool) -> None:
    medians = _medians(seconds)
    table = Table(box=None, header_style="bold")
    for column in ("time to first answer", "median s", "min s", "max s"):
        table.add_column(column, justify="left" if column.startswith("time") else "right")
    for name, values in seconds.items():
        table.add_row(name, *(f"{value:.1f}" for value in (medians[name], min(values), max(values))))
    console.print(table)
    console.print(f"ratio {medians[OURS] / medians[BARE]:.2f}")
    write_atomic(path, json.dumps(as_json(seconds, partial), indent=2))
    console.print(f"written to {path}")


def as_json(seconds: dict[str, list[float]], partial: bool) -> dict[str, Any]:
    medians = _medians(seconds)
    ratio = medians[OURS] / medians[BARE]
    return {**benchmark_record.header("startup"), "seconds": seconds, "ratio_of_medians": ratio, "partial": partial}


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def _time_to_answer(chosen: choice.Choice, start: Starter) -> float:
    began = time.monotonic()
    with contextlib.ExitStack() as held:
        servers, urls = start(chosen, held)
        try:
            for url in urls:
                _wait_for_answer(url, chosen.model_id, servers, began)
            return time.monotonic() - began
        finally:
            processes.stop_family(servers)


def _wait_for_answer(url: str, model_id: str, servers: list[subprocess.Popen[bytes]], began: float) -> None:
    """Blocks until a greedy completion is answered. Greedy, so that the bare servers do not compile their sampler either."""
    request = {"model": model_id, "prompt": "Strata", "max_tokens": 1, "temperature": 0}
    while time.monotonic() - began < LIMIT_S:
        for number, process in enumerate(servers):
            if process.poll() is not None:
                raise UserError(
                    f"A server ended with code {process.returncode} before it answered at {url}:\n"
                    f"{processes.last_lines(_log(number))}",
                    f"See {_log(number)}, or start it alone: strata serve.",
                )
        with contextlib.suppress(httpx.TransportError):
            if httpx.post(f"{url}/v1/completions", json=request, headers=access.headers_for(url), timeout=30).status_code == 200:
                return
        time.sleep(0.2)
    raise UserError(f"{url} did not answer within {LIMIT_S:.0f} s.", "See 'strata doctor'.")


def _start_ours(chosen: choice.Choice, held: contextlib.ExitStack) -> Started:
    port = held.enter_context(ports.reserve()).port
    command = [sys.executable, "-m", "strata.platform.cli", "serve", *chosen.words, f"serve.port={port}"]
    return [_popen(command, {}, 0)], [f"http://127.0.0.1:{port}"]


def _start_bare(chosen: choice.Choice, held: contextlib.ExitStack) -> Started:
    servers: list[subprocess.Popen[bytes]] = []
    urls: list[str] = []
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        spec = EngineSpec.of(role, chosen.section, chosen.folder, chosen.model_id, Network.within(one_machine=True))
        port, side_channel = (held.enter_context(ports.reserve()).port for _ in range(2))
        kwargs = spec.engine_kwargs()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model", spec.model_dir, "--served-model-name", spec.model_id, "--dtype", kwargs["dtype"]]
        command += [
            "--max-num-seqs",
            str(kwargs["max_num_seqs"]),
            "--kv-transfer-config",
            json.dumps({key: value for key, value in kwargs["kv_transfer_config"].items() if key != "kv_connector_module_path"}),
        ]
        command += ["--enforce-eager"] if kwargs["enforce_eager"] else []
        # Without the settings of Strata's one-process engine and of its NIXL patch, which a bare server does not have.
        ours = {"VLLM_ENABLE_V1_MULTIPROCESSING", DELAY_US}
        environment = {key: value for key, value in spec.environment().items() if key not in ours}
        servers.append(_popen(command, environment | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}, len(servers)))
        urls.append(f"http://127.0.0.1:{port}")
    return servers, urls


def _popen(command: list[str], environment: dict[str, str], number: int) -> subprocess.Popen[bytes]:
    _log(number).parent.mkdir(parents=True, exist_ok=True)
    with _log(number).open("wb") as output:
        return subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # Ctrl-C reaches this command alone, which then ends them in order
            preexec_fn=processes.ending_with_us(),
        )


def _log(number: int) -> Path:
    return cache_dir() / "bench" / "logs" / f"startup-{number}.log"
