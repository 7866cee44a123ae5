"""Command `strata batch`. Light imports only: `strata --help` loads this module."""

from pathlib import Path
from typing import Annotated

import typer


def batch(
    source: Annotated[str, typer.Argument(help="JSONL file of requests, or the id of a batch that was submitted before.")],
    to: Annotated[Path | None, typer.Option(help="File for the answers. Default: SOURCE with .output.jsonl.")] = None,
    endpoint: Annotated[str, typer.Option(help="Route that answers the requests.")] = "/v1/chat/completions",
    window: Annotated[str, typer.Option(help="Hours until the batch expires.")] = "24h",
    url: Annotated[str, typer.Option(help="Address of the endpoint.")] = "http://127.0.0.1:8000",
) -> None:
    """Run a file of requests in the endpoint's idle time, and fetch the answers. Ctrl-C leaves the batch running."""
    from strata.serving.batches import submit

    submit.run(source, to, endpoint, window, url)
