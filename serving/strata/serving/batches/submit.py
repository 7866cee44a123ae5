"""Submits a batch to an endpoint, follows it, and writes its output: `strata batch`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.serving import client

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

LOOK_S = 0.5
OUTAGE_S = 120.0  # for which a lost endpoint is looked for
ENDED = ("completed", "failed", "expired", "cancelled")
PREFIX = "batch_"


def run(source: str, to: Path | None, endpoint: str, window: str, url: str) -> None:
    console = Console(highlight=False)
    connected = client.connect(url)
    with _explained(url):
        if source.startswith(PREFIX) and not Path(source).exists():
            batch = connected.batches.retrieve(source)
        else:
            batch = _submit(connected, Path(source), endpoint, window)
    target = to or Path(source).with_suffix(".output.jsonl")
    console.print(f"{batch.id} of {url}", markup=False, soft_wrap=True)
    try:
        with _explained(url):
            done = _follow(connected, batch, console)
            _write(connected, done, target, console)
    except KeyboardInterrupt:
        again = f"strata batch {batch.id} --to {target} --url {url}"
        console.print(f"The batch continues. Fetch its answers with: {again}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if done.status != "completed":
        raise typer.Exit(1)


def _submit(connected: "openai.OpenAI", source: Path, endpoint: str, window: str) -> "Batch":
    try:
        content = source.open("rb")
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}.", "Name a JSONL file of requests.") from None
    with content:
        file = connected.files.create(file=(source.name, content), purpose="batch")
    # The client's own types name OpenAI's only window and its routes.
    settings: Any = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": window}
    return connected.batches.create(**settings)


def _follow(connected: "openai.OpenAI", batch: "Batch", console: Console) -> "Batch":
    """Returns the batch when it has ended. Outlives a restart of the endpoint."""
    import openai

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    lost_at: float | None = None
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        shown = progress.add_task(batch.status, total=None)
        while batch.status not in ENDED:
            time.sleep(LOOK_S)
            try:
                batch = connected.batches.retrieve(batch.id)
                lost_at = None
            except (openai.APIConnectionError, openai.InternalServerError):
                lost_at = lost_at or time.monotonic()
                if time.monotonic() > lost_at + OUTAGE_S:
                    raise
            counts = batch.request_counts
            if counts is not None:
                ended = counts.completed + counts.failed
                progress.update(shown, description=batch.status, total=counts.total or None, completed=ended)
    return batch


def _write(connected: "openai.OpenAI", batch: "Batch", target: Path, console: Console) -> None:
    for error in (batch.errors.data or []) if batch.errors is not None else []:
        where = f"line {error.line}: " if error.line is not None else ""
        console.print(f"{where}{error.message} ({error.code})", markup=False, soft_wrap=True)
    for name, path in ((batch.output_file_id, target), (batch.error_file_id, target.with_suffix(".errors.jsonl"))):
        if name is not None:
            write_atomic(path, connected.files.content(name).content)
            console.print(f"{path}", markup=False, soft_wrap=True)
    counts = batch.request_counts
    answered = f": {counts.completed} answers, {counts.failed} errors" if counts is not None else ""
    console.print(f"{batch.status}{answered}", markup=False)


@contextmanager
def _explained(url: str) -> Iterator[None]:
    import openai

    try:
        yield
    except openai.APIStatusError as error:
        tree = error.body if isinstance(error.body, dict) else {}
        raise UserError(str(tree.get("message", error)), "Correct the file or the options.") from None
    except openai.APIConnectionError:
        raise UserError(
            f"Nothing answers at {url}.", "Start the endpoint with 'make serve', or name its address (--url)."
        ) from None
