"""Catalog of operations: source files, tuning cases and benchmark of each.

Operation modules are imported on first use because `strata --help` imports this module.
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
    """An operation, named after its module in `ops/` or after the folder that holds a module of the same name."""

    name: str
    use: str
    does: str

    def files(self) -> list[Path]:
        """Source files; the module that defines the operation comes first."""
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
    Op("rms_norm", "both", "normalises rows, optionally after adding a residual"),
    Op("rope", "both", "rotates queries and keys by position, in place or out of place"),
    Op("swiglu", "both", "silu(gate) * up, recomputed in the backward pass"),
    Op("linear_cross_entropy", "training", "output projection and loss, without the logits of all tokens in memory"),
    Op("flash_attention", "training, prefill", "attention, forward and backward, with packed documents"),
    Op("paged_attention", "serving", "attention over a paged KV cache, decode and prefill mixed"),
    Op("kv_cache_write", "serving", "scatters keys and values into the blocks of a paged KV cache"),
    Op("w4a16_linear", "serving", "linear layer with 4-bit weights of GPTQ or AWQ and 16-bit activations"),
    Op("sample", "serving", "penalties, temperature, min-p, top-k, top-p and a seeded draw in one pass over the logits"),
)


def chosen(names: Iterable[str] | None) -> list[Op]:
    """The operations with these names; all operations if `names` is empty."""
    known = {op.name: op for op in OPS}
    for name in names or ():
        if name not in known:
            raise UserError(f"There is no operation '{name}'.", f"Use one of {', '.join(known)}.")
    return [known[name] for name in names] if names else list(OPS)


def functions_named(op: Op, name: str) -> list[Callable[..., Any]]:
    """The functions called `name` (for example `tuning_cases`) in the modules of an operation."""
    found = [getattr(module, name) for module in op.modules() if hasattr(module, name)]
    return [function for function in found if inspect.isfunction(function)]
