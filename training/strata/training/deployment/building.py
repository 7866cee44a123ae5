"""Builds a file or a folder under a temporary name beside its target and renames it when it is complete."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strata.training.checkpoint.export import building_prefix, finish_or_remove_leftovers
from strata.training.interrupts import caught


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """A new folder beside the target, removed at the end, also by Ctrl-C and SIGTERM. What a kill left there is removed first."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    finish_or_remove_leftovers(target)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=building_prefix(target, os.getpid())))
    with caught():
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
