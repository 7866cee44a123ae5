"""Cache folders that are complete or absent: built next to their final path, renamed, and rebuilt if a file is damaged.

A folder is named after a digest of everything that determines its content. Two processes that build the same one concurrently
write the same bytes, so the first to finish wins. `meta.json` records the digest of the other files.
"""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from strata.training.data.digests import Files, writable

BUILDING = f".building-{socket.gethostname()}-"


def build_once(
    folder: Path, build: Callable[[Path], None], files: Callable[[Path], list[Path]], contents: str, say: Callable[[str], None]
) -> None:
    """Builds the folder unless it exists undamaged. `build` fills an empty folder, `meta.json` with the key `digest` included;
    `files` lists the files that the digest covers; `contents` names them in a message about damage."""
    if folder.is_dir():
        if not (damage := _damage(folder, files)):
            return
        say(f"The {contents} in {folder} are damaged ({damage}); building them again.")
        shutil.rmtree(folder)
    with writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{BUILDING}{os.getpid()}-"))
        try:
            build(building)
            building.rename(folder)
        except OSError:
            if not (folder / "meta.json").is_file():  # otherwise another run finished first, with the same content
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    Files(files(folder)).remember(_recorded(folder))


def all_files(folder: Path) -> list[Path]:
    """Every file of a folder but `meta.json`."""
    return sorted(path for path in folder.iterdir() if path.name != "meta.json")


def _recorded(folder: Path) -> str:
    digest: str = json.loads((folder / "meta.json").read_text())["digest"]
    return digest


def _damage(folder: Path, files: Callable[[Path], list[Path]]) -> str | None:
    """Damage to a cache entry, None if it is valid. Reads only files that changed since they were last verified."""
    try:
        recorded = _recorded(folder)
        found = Files(files(folder)).digest()
    except (OSError, ValueError, TypeError, KeyError) as error:  # UserError is a ValueError
        return " ".join(str(error).split())
    return None if found == recorded else "a file differs from what was written"


def _remove_abandoned(parent: Path) -> None:
    """Deletes partial folders of builds that were killed on this machine."""
    for path in parent.glob(f"{BUILDING}*"):
        pid = path.name.removeprefix(BUILDING).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
