"""Process of a contender, from its start until it answers, and to its end."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from strata.platform import ports, processes
from strata.serving import access, client
from strata.serving.bench.clients.load import Target
from strata.serving.bench.contenders.contenders import HOST, Contender, Launch, own_environment
from strata.serving.bench.contenders.subject import Subject

START_LIMIT_S = 600.0
STOP_LIMIT_S = 60.0


class Failed(Exception):
    """A contender that did not answer: the reason, and the end of its log."""


@dataclass(frozen=True)
class Server:
    target: Target
    start_s: float
    log: Path


@contextmanager
def running(contender: Contender, subject: Subject, prefix_caching: bool, log: Path) -> Iterator[Server]:
    with ExitStack() as held:
        port = held.enter_context(ports.reserve(HOST)).port
        launch = contender.launch(subject, prefix_caching, port)
        for further in launch.held:
            held.enter_context(further)
        with _started(launch, contender, subject, log, port) as server:
            yield server


@contextmanager
def _started(launch: Launch, contender: Contender, subject: Subject, log: Path, port: int) -> Iterator[Server]:
    began = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # In a session of its own: Ctrl-C reaches this command alone, which then ends it in order.
        process = subprocess.Popen(
            launch.command,
            env=own_environment(launch),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=processes.ending_with_us(),
        )
    failure, url = None, f"http://{HOST}:{port}"
    try:
        target = Target(HOST, port, subject.model_id, launch.key or access.key_for(url))
        models = (None, launch.further_model) if launch.further_model else (None,)
        failure = _wait_for_answer(target, url, process, began, models if contender.has_ready else ())
        if failure is None:
            yield Server(target, time.monotonic() - began, log)
    finally:
        processes.stop_family([process], STOP_LIMIT_S)  # the next contender needs the memory and the cores
    if failure is not None:  # raised after the end, which may write the reason into the log
        raise Failed(f"{failure}\n{processes.last_lines(log)}\n(see {log})")


def _wait_for_answer(
    target: Target, url: str, process: subprocess.Popen[bytes], began: float, ready: Sequence[str | None]
) -> str | None:
    """Blocks until a completion is answered and `GET /ready` is for all models of `ready`; None is the main one. Returns the
    reason if they never are. A completion, since a server may listen long before its engine is up."""
    request = {"model": target.model, "prompt": [2, 3, 4, 5], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    last = ""
    while time.monotonic() - began < START_LIMIT_S:
        if process.poll() is not None:
            return f"It ended with code {process.returncode} before it answered."
        with suppress(httpx.TransportError):
            response = httpx.post(f"{url}/v1/completions", json=request, headers=target.headers, timeout=60)
            if response.status_code == 200 and not any(client.obstacle(url, model) for model in ready):
                return None
            last = f" Its last response: HTTP {response.status_code} {response.text[:200]}"
        time.sleep(0.2)
    return f"It did not answer within {START_LIMIT_S:.0f} s.{last}"
