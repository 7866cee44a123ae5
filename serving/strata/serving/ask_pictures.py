"""Asks a picture endpoint for a few pictures, as a client would, and writes them as PNG files: `strata serve --ask`."""

import base64
import re
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from strata.platform.files import home, write_atomic
from strata.serving.runtime.endpoint import Endpoint

PROMPTS = ("a red circle", "a large blue square on a green background")
SEED = 0


def ask(here: Endpoint, prompts: Sequence[str], console: Console) -> None:
    """Prints the path of each picture, its seconds and steps per second."""
    connected = here.client()
    table = Table(box=None, header_style="bold")
    for column in ("prompt", "picture", "size", "seconds", "steps/s"):
        table.add_column(column, justify="right" if column in ("seconds", "steps/s") else "left", overflow="fold")
    for prompt in prompts or PROMPTS:
        began, steps, file, size = time.perf_counter(), 0, b"", ""
        own = {"seed": SEED, "progress": True}
        for event in connected.images.generate(model=here.model, prompt=prompt, stream=True, extra_body=own):
            if event.type == "image_generation.completed":
                file, size = base64.b64decode(event.b64_json), event.size
            else:
                steps += 1
        took = time.perf_counter() - began
        path = _path(prompt)
        write_atomic(path, file)
        table.add_row(repr(prompt), str(path), size, f"{took:.2f}", f"{steps / took:.1f}")
    console.print(table, markup=False)


def _path(prompt: str) -> Path:
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60]
    return home() / "pictures" / f"{words or 'picture'}.png"
