"""Division of a GPU's memory between engines that start at the same time.

Free memory alone does not show what engines that are still starting will use. So each engine claims its share first, in a ledger
on its node: the first of those that start together notes the free memory, and the shares of the others come off it. An engine
whose share does not fit waits until the others have started. Then free memory is exact again, and vLLM decides.

Every claim has a file that its engine holds locked. The kernel unlocks it when the engine's process ends, however it ends.
"""

import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

from strata.platform.files import write_atomic

# Memory of an engine beside its share: CUDA context, NIXL's buffers.
BESIDE_SHARE = 1 << 30
LOOK_S = 0.2
RELEASE_S = 15.0  # until the memory of an engine that was killed is free
LIMIT_S = 1800.0  # as the default of serve.start_timeout_s on GPUs


@dataclass(frozen=True)
class Claim:
    bytes: int
    alone: bool = False  # no other engine may start meanwhile
    started: bool = False


@dataclass(frozen=True)
class Ledger:
    """Claims of engines that started together, and the free memory before the first of them."""

    free: int = 0
    claims: Mapping[str, Claim] = field(default_factory=dict)


def with_claim(ledger: Ledger, alive: Collection[str], name: str, share: int, free: int, alone: bool) -> Ledger | None:
    """The ledger with a further claim; None if the engine has to wait for those that start. `alone`: it cannot start beside
    others. Nor can one that would leave no memory beside its share: its memory has to be measured, not estimated."""
    claims = {known: claim for known, claim in ledger.claims.items() if known in alive}
    wanted = share + BESIDE_SHARE
    starting = [claim for claim in claims.values() if not claim.started]
    if not starting:
        return Ledger(free, {name: Claim(wanted, alone or wanted > free)})
    left = ledger.free - sum(claim.bytes for claim in claims.values())
    if alone or wanted > left or any(claim.alone for claim in starting):
        return None
    return Ledger(ledger.free, claims | {name: Claim(wanted)})


class Share:
    """A claim of this process."""

    def __init__(self, folder: Path, name: str, held: IO[str], alone: bool) -> None:
        self.alone = alone
        self._folder, self._name, self._held = folder, name, held

    def started(self) -> None:
        """The engine has allocated all that it will. It counts until those that start beside it have started, too."""
        with _locked(self._folder):
            ledger = _read(self._folder)
            if (claim := ledger.claims.get(self._name)) is not None:
                _write(self._folder, replace(ledger, claims={**ledger.claims, self._name: replace(claim, started=True)}))


def folder_of(gpu: str) -> Path:
    return Path(f"/tmp/strata-gpu-{os.getuid()}-{gpu}")


def claim(folder: Path, share: int, free: Callable[[], int], alone: bool = False) -> Share:
    """Claims a share of the GPU's memory, in bytes. Blocks while it does not fit beside the engines that start; raises
    TimeoutError after LIMIT_S. `free` measures the GPU."""
    folder.mkdir(mode=0o700, exist_ok=True)
    name, began = uuid.uuid4().hex, time.monotonic()
    held = (folder / name).open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    while (waited := time.monotonic() - began) < LIMIT_S:
        with _locked(folder):
            ledger, free_now = _read(folder), free()
            alive = {known for known in ledger.claims if _is_held(folder / known)}
            claimed = with_claim(ledger, alive, name, share, free_now, alone)
            if claimed is not None and (free_now >= share or waited >= RELEASE_S):  # with less, vLLM reports the reason
                for gone in ledger.claims.keys() - claimed.claims.keys():
                    (folder / gone).unlink(missing_ok=True)
                _write(folder, claimed)
                return Share(folder, name, held, claimed.claims[name].alone)
        time.sleep(LOOK_S)
    (folder / name).unlink()
    raise TimeoutError(f"Other engines have been starting on this GPU for {LIMIT_S:.0f} s. See {folder}.")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held for milliseconds
        yield


def _is_held(path: Path) -> bool:
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _read(folder: Path) -> Ledger:
    with suppress(FileNotFoundError):
        written = json.loads((folder / "ledger.json").read_text())
        return Ledger(written["free"], {name: Claim(**claim) for name, claim in written["claims"].items()})
    return Ledger()


def _write(folder: Path, ledger: Ledger) -> None:
    write_atomic(folder / "ledger.json", json.dumps(asdict(ledger)))
