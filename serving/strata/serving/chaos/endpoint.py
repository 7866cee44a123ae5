"""An endpoint to kill replicas of, started as a user would start it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from strata.platform import ports, processes
from strata.platform.errors import UserError
from strata.platform.files import cache_dir
from strata.serving.models import choice

READY = "Ctrl-C stops it"  # what `strata serve` says when it answers
START_LIMIT_S = 600.0
# Two that decode: a stream whose replica dies goes on at the other one at once.
REPLICAS = ("serve.prefill.replicas=1", "serve.decode.replicas=2")


@contextmanager
def started(overrides: Sequence[str], run: str | None, model: Path | None) -> Iterator[str]:
    """Yields its address. What it says is in a file, for the terminal is the report's."""
    with ports.reserve() as held:
        chosen = choice.choose([*REPLICAS, *overrides, f"serve.port={held.port}"], run, model, None)
        with _started(chosen) as url:
            yield url


@contextmanager
def _started(chosen: choice.Choice) -> Iterator[str]:
    log = log_file()
    with log.open("wb") as output:
        command = _serve(chosen)
        # In a session of its own: a Ctrl-C is this command's, which then stops the endpoint, once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=processes.ending_with_us(),
        )
    try:
        wait_until_ready(process, log)
        yield ports.url(chosen.section.host, chosen.section.port)
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


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while READY not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise UserError(
                f"The endpoint did not start:\n{processes.last_lines(log)}", f"See {log}, or start it alone: strata serve."
            )
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
