"""Endpoint under test of `strata chaos`, started with `strata serve` as a user would start it."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from strata.platform import ports, processes
from strata.platform.errors import UserError
from strata.platform.files import cache_dir
from strata.serving import client
from strata.serving.models import choice

# Two decode replicas: a stream whose replica dies continues on the other without waiting for a new one.
REPLICAS = ("serve.prefill.replicas=1", "serve.decode.replicas=2")


@contextmanager
def started(overrides: Sequence[str], run: str | None, model: Path | None) -> Iterator[str]:
    """Yields the endpoint's address. Its output goes to a file, since the report is printed in the terminal."""
    with ports.reserve() as held:
        chosen = choice.choose([*REPLICAS, *overrides, f"serve.port={held.port}"], run, model, None)
        with _started(chosen) as url:
            yield url


@contextmanager
def _started(chosen: choice.Choice) -> Iterator[str]:
    log, url = log_file(), ports.url(chosen.section.host, chosen.section.port)
    with log.open("wb") as output:
        command = _serve(chosen)
        # In a session of its own: Ctrl-C reaches this command alone, which then stops the endpoint, once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=processes.ending_with_us(),
        )
    try:
        wait_until_ready(url, process, log)
        yield url
    finally:
        _stop(process)


def command(overrides: Sequence[str], run: str | None, model: Path | None, port: int) -> list[str]:
    return _serve(choice.choose([*overrides, f"serve.port={port}"], run, model, None))


def log_file() -> Path:
    log = cache_dir() / "chaos" / "serve.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return log


def _serve(chosen: choice.Choice) -> list[str]:
    return [sys.executable, "-m", "strata.platform.cli", "serve", *chosen.words]


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Blocks until the endpoint is ready. Raises UserError with the end of its log if it does not become ready."""
    try:
        client.wait_until_ready(url, process)
    except client.NotReady as error:
        raise UserError(f"{error.cause}\n{processes.last_lines(log)}", f"See {log}, or start it alone: strata serve.") from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
