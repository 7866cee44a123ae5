"""Time to the first answer of `strata serve` and of bare vLLM with the same settings.

On CPUs the peer is two bare servers, started side by side; on GPUs it is one with a whole GPU, since vLLM cannot start two on one
GPU at the same time. Rounds alternate and medians are compared, since machines are shared. Both are measured from outside: from
the start of the processes to the first completion, which is requested until it is answered. On GPUs Strata has to answer `/ready`
as well: both engines are up then, where the peer has one. There each contender has its own compile caches, empty in the first
round, so that none loads what the other has compiled.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from strata.platform import benchmark_record, ports, processes
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.platform.ray_cluster import local_ray
from strata.serving import access, client
from strata.serving.bench import start_phases
from strata.serving.bench.contenders import engines
from strata.serving.models import choice, model_dir
from strata.serving.spec import EngineSpec, Network, Role
from strata.serving.vllm_patches.nixl_delay import DELAY_US

LIMIT_S = 600.0
Started = tuple[list[subprocess.Popen[bytes]], list[str]]  # the processes, and the addresses to wait for
Starter = Callable[[choice.Choice, contextlib.ExitStack], Started]  # ports are held until the stack is closed
OURS, BARE, BARE_GPU = "strata serve", "two bare vLLM servers", "one bare vLLM server"


@dataclass(frozen=True)
class Start:
    seconds: float
    phases: dict[str, dict[str, float]]  # of each engine


def bench(overrides: Sequence[str], run: str | None, model: Path | None, recipe: str | None, rounds: int, path: Path) -> None:
    chosen = choice.choose(overrides, run, model, recipe)
    model_dir.check(chosen.folder)
    if chosen.section.prefill.replicas == 0:
        raise UserError("This comparison needs a prefill engine.", "Set serve.prefill.replicas=1.")
    on_gpu = chosen.section.device == "gpu"
    words = chosen.words if recipe is None or "--recipe" in chosen.words else (*chosen.words, "--recipe", recipe)
    chosen = replace(chosen, words=words)
    contenders = {OURS: _start_ours} | ({BARE_GPU: _start_bare_gpu} if on_gpu else {BARE: _start_bare})
    starts: dict[str, list[Start]] = {name: [] for name in contenders}
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    caches = tempfile.TemporaryDirectory(prefix="strata-bench-", ignore_cleanup_errors=True)
    try:
        for number in range(rounds):
            for name, start in contenders.items():
                own = _caches(Path(caches.name) / name.replace(" ", "-")) if on_gpu else {}
                with console.status(f"round {number + 1} of {rounds}: {name}"), processes.environment(own):
                    starts[name].append(_time_to_answer(chosen, start, has_ready=on_gpu and name == OURS))
                console.print(f"round {number + 1}: {name} {starts[name][-1].seconds:.1f} s")
                for engine, phases in starts[name][-1].phases.items():
                    console.print(f"  {engine}: " + " · ".join(f"{phase} {seconds:.0f}" for phase, seconds in phases.items()))
    except KeyboardInterrupt:
        if all(starts.values()):
            _report(starts, console, path, partial=True)
        console.print("Stopped before all rounds were measured.")
        raise typer.Exit(130) from None
    finally:
        caches.cleanup()
    _report(starts, console, path, partial=False)


def _report(starts: dict[str, list[Start]], console: Console, path: Path, partial: bool) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("time to first answer", "median s", "min s", "max s"):
        table.add_column(column, justify="left" if column.startswith("time") else "right")
    for name, values in starts.items():
        seconds = [start.seconds for start in values]
        table.add_row(name, *(f"{value:.1f}" for value in (statistics.median(seconds), min(seconds), max(seconds))))
    console.print(table)
    written = as_json(starts, partial)
    console.print(f"ratio {written['ratio_of_medians']:.2f}")
    write_atomic(path, json.dumps(written, indent=2))
    console.print(f"written to {path}")


def as_json(starts: dict[str, list[Start]], partial: bool) -> dict[str, Any]:
    seconds = {name: [start.seconds for start in values] for name, values in starts.items()}
    ours, peer = (statistics.median(values) for values in seconds.values())
    return {
        **benchmark_record.header("startup"),
        "seconds": seconds,
        "phases": {name: [start.phases for start in values] for name, values in starts.items()},
        "ratio_of_medians": ours / peer,
        "partial": partial,
    }


def _time_to_answer(chosen: choice.Choice, start: Starter, has_ready: bool) -> Start:
    began, began_at = time.monotonic(), datetime.now()
    with contextlib.ExitStack() as held:
        servers, urls = start(chosen, held)
        try:
            for url in urls:
                _wait_for_answer(url, chosen.model_id, servers, began, has_ready)
            seconds, answered = time.monotonic() - began, datetime.now()
            return Start(seconds, start_phases.of_engines(_logs(len(servers), began_at), began_at, answered))
        finally:
            processes.stop_family(servers)


def _caches(folder: Path) -> dict[str, str]:
    return {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TRITON_CACHE_DIR": str(folder / "triton")}


def _logs(servers: int, began: datetime) -> list[Path]:
    """Logs of the servers, and those of Ray's workers since `began`."""
    sessions = [path for path in local_ray.TEMP_DIR.glob("session_2*") if path.stat().st_mtime >= began.timestamp()]
    return [*map(_log, range(servers)), *(log for session in sessions for log in (session / "logs").glob("worker-*.out"))]


def _wait_for_answer(url: str, model_id: str, servers: list[subprocess.Popen[bytes]], began: float, has_ready: bool) -> None:
    """Blocks until a greedy completion is answered. Greedy, so that the bare servers do not compile their sampler either. With
    `has_ready`, `/ready` has to be answered, too."""
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
            response = httpx.post(f"{url}/v1/completions", json=request, headers=access.headers_for(url), timeout=30)
            if response.status_code == 200 and not (has_ready and client.obstacle(url)):
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


def _start_bare_gpu(chosen: choice.Choice, held: contextlib.ExitStack) -> Started:
    port = held.enter_context(ports.reserve()).port
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(chosen.folder.resolve()), "--served-model-name", chosen.model_id]
    command += engines.flags(engines.kwargs(chosen.section, chosen.section.prefix_caching))
    environment = engines.environment(chosen.section, engines=1)
    return [_popen(command, environment, 0)], [f"http://127.0.0.1:{port}"]


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
