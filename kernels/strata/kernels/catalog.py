"""Which operations there are, and where to find what each of them offers: its shapes to tune, its benchmark.

Modules are imported when asked for: `strata --help` reads this one.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from strata.platform.errors import UserError

FOLDER = Path(__file__).parent / "ops"


@dataclass(frozen=True)
class Op:
    """Named as its module in `ops/`, or as the folder there whose module of the same name it is."""

    name: str
    use: str
    does: str

    def files(self) -> list[Path]:
        """The one with the operation itself first."""
        folder = FOLDER / self.name
        if not folder.is_dir():
            return [FOLDER / f"{self.name}.py"]
        first = folder / f"{self.name}.py"
        return [first, *sorted(file for file in folder.glob("[!_]*.py") if file != first)]

    def modules(self) -> list[ModuleType]:
        return [
            import_module(".".join(("strata.kernels.ops", *path.relative_to(FOLDER).with_suffix("").parts)))
            for path in self.files()
        ]

    def module(self) -> ModuleType:
        return self.modules()[0]

    def benchmark(self) -> ModuleType:
        return import_module(f"strata.kernels.bench.cases.{self.name}")


OPS = (
    Op("rms_norm", "both", "normalise rows, with or without adding the residual first"),
    Op("rope", "both", "rotate queries and keys by their positions, in place or not"),
    Op("swiglu", "both", "silu(gate) * up, which the backward pass computes again"),
    Op("linear_cross_entropy", "training", "the last projection and the loss, without the logits of all tokens in memory"),
    Op("flash_attention", "training, prefill", "attention, forward and backward, also over packed documents"),
    Op("paged_attention", "serving", "attention over a KV cache in blocks, decode and prefill mixed"),
    Op("kv_cache_write", "serving", "scatter keys and values into the cache's blocks"),
)


def chosen(names: Iterable[str] | None) -> list[Op]:
    """All of them when none is named."""
    known = {op.name: op for op in OPS}
    for name in names or ():
        if name not in known:
            raise UserError(f"There is no operation '{name}'.", f"There are {', '.join(known)}.")
    return [known[name] for name in names] if names else list(OPS)


def offered(op: Op, name: str) -> list[Callable[..., Any]]:
    """The functions called `name` in the operation's modules: such as its `tuning_cases`."""
    found = [getattr(module, name) for module in op.modules() if hasattr(module, name)]
    return [function for function in found if inspect.isfunction(function)]
