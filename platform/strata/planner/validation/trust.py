"""Expected error of a plan, by regime.

The errors are in `published/errors.json`, which `cli/check_regimes.py` generates by planning the rows of
`published/regimes.csv`. A test checks that the file is up to date.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from strata.planner.catalogue.shape import Shape
from strata.planner.catalogue.software import Software
from strata.planner.layout import Layout
from strata.platform.hardware.specs import Gpu

PUBLISHED = Path(__file__).parent / "published"
ERRORS = PUBLISHED / "errors.json"
LONG = 32768  # tokens of a sequence
CHECKED_GPUS = ("a100-40gb", "a100-80gb", "h100-sxm", "b200")  # with a published step time in the validated regime
VALIDATED = "dense models trained by Megatron with ZeRO 0 or 1, sequences below 32k tokens, on A100, H100 or B200"
REGIMES = {
    "dense": "dense models trained by Megatron with ZeRO 0 or 1, below 32k tokens",
    "sharded": "ZeRO-2, ZeRO-3 and FSDP",
    "long": "sequences of 32k tokens and more",
    "experts": "mixtures of experts",
    "other-program": "training programs other than Megatron and FSDP",
    "memory": "memory of a GPU under FSDP and nanotron",
    "ttft": "serving: time to first token",
    "itl": "serving: inter-token latency",
    "throughput": "serving: output tokens per second",
    "one-node": "collectives inside a node",
    "between-nodes": "collectives between nodes",
}


@dataclass(frozen=True)
class Errors:
    """Errors of a regime's figures: mean absolute error, signed mean, lowest and highest."""

    figures: int
    mean: float
    signed: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Trust:
    """Expected error of a plan. `regimes` has the errors of each regime of the plan outside the validated one; `unchecked` has
    the properties without any published figure. `line` is empty for a plan in the validated regime."""

    validated: bool
    line: str
    regimes: dict[str, Errors]
    unchecked: tuple[str, ...] = ()


def regimes_of(shape: Shape, layout: Layout, sequence: int, software: Software) -> list[str]:
    """Regimes of a plan outside the validated one, the most specific first."""
    megatron, fsdp = software.name.startswith("megatron"), software.name == "torch-fsdp"
    found = {
        "experts": shape.experts is not None,
        "long": sequence >= LONG,
        "sharded": layout.zero >= 2 or fsdp,
        "other-program": not megatron and not fsdp,
    }
    return [name for name, holds in found.items() if holds]


def of_training(shape: Shape, layout: Layout, sequence: int, gpu: Gpu, software: Software) -> Trust:
    names, unchecked = regimes_of(shape, layout, sequence, software), _unchecked(layout, gpu)
    if not names and not unchecked:
        return Trust(True, "", {})
    errors = {name: _errors(name) for name in names}
    clauses = [f"{REGIMES[name]}: {_range(errors[name], 'fast', 'slow')}" for name in names]
    if "sharded" in names or "other-program" in names:
        errors["memory"] = _errors("memory")
        clauses.append(f"{REGIMES['memory']}: {_range(errors['memory'], 'small', 'large')}")
    clauses += [f"no published run was checked {what}" for what in unchecked]
    return Trust(False, f"Outside the validated regime ({VALIDATED}). {_sentences(clauses)}", errors, unchecked)


def of_serving() -> Trust:
    errors = {name: _errors(name) for name in ("ttft", "itl", "throughput")}
    clauses = [f"{REGIMES[name]}: {_range(found, 'fast', 'slow')}" for name, found in errors.items()]
    return Trust(False, f"Checked against few published figures. {_sentences(clauses)}", errors)


def of_collectives(domains: int) -> Trust:
    name = "one-node" if domains == 1 else "between-nodes"
    found = _errors(name)
    return Trust(False, f"Against published figures, {REGIMES[name]}: {_range(found, 'fast', 'slow')}.", {name: found})


def _unchecked(layout: Layout, gpu: Gpu) -> tuple[str, ...]:
    found = {
        f"on {gpu.name}": gpu.name not in CHECKED_GPUS,
        "with offloading": layout.offload != "none",
        "in fp32": layout.precision == "fp32",
        "with sequences split by heads": layout.sequence > 1,
    }
    return tuple(what for what, holds in found.items() if holds)


def _errors(name: str) -> Errors:
    return _all_errors()[name]


@cache
def _all_errors() -> dict[str, Errors]:
    return {name: Errors(**found) for name, found in json.loads(ERRORS.read_text()).items()}


def _range(found: Errors, below: str, above: str) -> str:
    ends = f"{_side(found.lowest, below, above)} to {_side(found.highest, below, above)}, " if found.figures > 1 else ""
    return f"{found.mean:.0%} off on average ({ends}{found.figures} published figure{'s' * (found.figures > 1)})"


def _side(error: float, below: str, above: str) -> str:
    return f"{abs(error):.0%} too {below if error < 0 else above}"


def _sentences(clauses: list[str]) -> str:
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."
