"""Launch configurations (tile sizes, warps, stages) by shape and architecture.

Unlike `triton.autotune`, nothing is measured at run time. A launch looks its configuration up: first in the table that
`strata kernels tune` measured on this machine, then in the table shipped for the architecture. If neither has the shape, it uses
the kernel's first candidate. A new shape may be slower than possible, but never waits for a search.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

Key = tuple[int | str | bool, ...]
Table = dict[str, "Config"]

# Architecture assumed for tensors that are not on a GPU; 0 is the interpreter. `strata kernels stages` sets it.
compiling_for: ContextVar[int] = ContextVar("compiling_for", default=0)


@dataclass(frozen=True)
class Config:
    """A launch configuration. `constants` are the kernel's own constexpr arguments, by name."""

    constants: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2

    def arguments(self) -> dict[str, int]:
        return {**self.constants, "num_warps": self.num_warps, "num_stages": self.num_stages}


def config(num_warps: int = 4, num_stages: int = 2, **constants: int) -> Config:
    return Config(constants, num_warps, num_stages)


class Tunable:
    """The tunable configuration of one kernel. `candidates(arch, key)` returns the configurations to measure, pruned by
    architecture (80, 90, 100; 0 for the interpreter on a CPU) and shape; the first is the default. A key holds the few properties
    of a call that affect the best choice, with sizes rounded by `bucket`, so that a short table covers every shape."""

    def __init__(self, name: str, candidates: Callable[[int, Key], Sequence[Config]]) -> None:
        self.name = name
        self.candidates = candidates
        self._known: dict[tuple[int, Key], dict[str, int]] = {}

    def arguments(self, key: Key, device: torch.device) -> dict[str, int]:
        """Launch keyword arguments. Cached: after the first call, a dictionary lookup."""
        arch = architecture(device)
        known = self._known.get((arch, key))
        if known is None:
            known = self._known[arch, key] = self.config(key, arch).arguments()
        return known

    def config(self, key: Key, arch: int) -> Config:
        line, default = _line(self.name, key), self.candidates(arch, key)[0]
        for table in (measured(arch), shipped(arch)):
            known = table.get(line)
            if known is not None and known.constants.keys() == default.constants.keys():  # otherwise written for an older kernel
                return known
        return default


@dataclass(frozen=True)
class TuningCase:
    """A shape to tune: `run` launches the kernel once with a configuration."""

    tunable: Tunable
    key: Key
    run: Callable[[Config], None]


def bucket(size: int) -> int:
    """The next power of two: sizes in between share a configuration."""
    return 1 << max(size - 1, 0).bit_length()


def architecture(device: torch.device) -> int:
    return _capability(device) if device.type == "cuda" else compiling_for.get()


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def shipped(arch: int) -> Table:
    return read(shipped_path(arch))


@cache
def measured(arch: int) -> Table:
    return read(measured_path(arch))


def shipped_path(arch: int) -> Path:
    return Path(__file__).with_name("tuned") / f"sm_{arch}.json"


def measured_path(arch: int) -> Path:
    home = os.environ.get("STRATA_HOME")
    return (Path(home) if home else Path.home()) / ".strata" / "kernels" / f"sm_{arch}.json"


def tune(
    cases: Iterable[TuningCase], arch: int, milliseconds: Callable[[Callable[[], None]], float]
) -> dict[str, list[tuple[Config, float]]]:
    """Time of every candidate, fastest first, by the table line of its kernel and key. Candidates that exceed the device's
    resources (for example shared memory) are left out."""
    from triton.runtime.errors import OutOfResources, PTXASError

    times: dict[str, list[tuple[Config, float]]] = {}
    for case in cases:
        timed = []
        for candidate in case.tunable.candidates(arch, case.key):
            try:
                timed.append((candidate, milliseconds(lambda case=case, candidate=candidate: case.run(candidate))))  # type: ignore[misc]
            except (OutOfResources, PTXASError):
                continue
        times[_line(case.tunable.name, case.key)] = sorted(timed, key=lambda one: one[1])
    return times


def write(path: Path, best: Mapping[str, Config]) -> None:
    """Merges `best` into the file. The file is replaced atomically."""
    lines = {**read(path), **best}
    text = json.dumps({line: lines[line].arguments() for line in sorted(lines)}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text + "\n")
    draft.replace(path)
    shipped.cache_clear()
    measured.cache_clear()


def read(path: Path) -> Table:
    if not path.is_file():
        return {}
    table = {}
    for line, arguments in json.loads(path.read_text()).items():
        constants = {name: value for name, value in arguments.items() if name not in ("num_warps", "num_stages")}
        table[line] = Config(constants, arguments["num_warps"], arguments["num_stages"])
    return table


def _line(name: str, key: Key) -> str:
    return " ".join([name, *map(str, key)])
