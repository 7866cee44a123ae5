"""Expectations for a step: the device's peaks, and the plan of `strata plan` for the same layout."""

from dataclasses import dataclass, field

from strata.planner.catalogue.software import program
from strata.planner.recipes import from_recipe, program_of
from strata.planner.step.step import plan_step
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue
from strata.platform.hardware.specs import Gpu
from strata.platform.recipe import Recipe
from strata.training.profile.analysis.summary import Summary

FABRIC = "ndr-400"  # for a plan across nodes; one node's plan does not use it
CLASSES = {
    "matrix products": ("products", "loss"),
    "attention": ("attention", "scores"),
    "memory-bound kernels": ("other work",),
    "recompute": ("recomputation",),
    "optimizer": ("optimizer",),
}


@dataclass(frozen=True)
class Faster:
    """A setting with which products are faster, and how many times."""

    setting: str
    times: float


@dataclass(frozen=True)
class Machine:
    """Peaks of one worker's device. `planned` has seconds of a step by class: planned and measured."""

    peak: float | None = None  # FLOP/s in the recipe's precision
    bandwidth: float | None = None  # bytes per second
    precision: str = ""
    faster: Faster | None = None
    planned: dict[str, tuple[float, float]] = field(default_factory=dict)


def on_gpu(summary: Summary) -> Machine:
    """Peaks by the catalogue, for a card that is in it."""
    recipe, name = summary.recipe, summary.ranks[0].trace.facts["device"]
    device = catalogue.device_named(name)
    if device is None:
        return Machine()
    tf32 = recipe.train.matmul != "highest" and "tf32" in device.flops
    precision = "bf16" if recipe.train.precision == "bf16" else "tf32" if tf32 else "fp32"
    peak = device.flops.get(precision)  # type: ignore[call-overload]
    faster = None
    if peak and precision == "fp32" and "tf32" in device.flops:
        faster = Faster("train.matmul=high", device.flops["tf32"] / peak)
    elif peak and precision != "bf16" and "bf16" in device.flops:
        faster = Faster("train.precision=bf16", device.flops["bf16"] / peak)
    gpu = device if isinstance(device, Gpu) else None
    return Machine(peak, gpu.bandwidth if gpu else None, precision, faster, planned(summary, gpu) if gpu else {})


def planned(summary: Summary, gpu: Gpu) -> dict[str, tuple[float, float]]:
    """Empty for a recipe that has no plan."""
    spent = _spent(summary.recipe, gpu)
    slowest = max(summary.ranks, key=lambda each: each.own)
    found = {}
    for name, causes in CLASSES.items():
        measured = sum(slowest.seconds.get(cause, 0.0) for cause in causes)
        if name in spent and (spent[name] or measured):
            found[name] = (spent[name], measured)
    talk = ("tensor parallelism", "sequence parallelism", "expert parallelism", "parameters gathered", "data parallelism")
    if spent:
        found["exposed communication"] = (sum(spent.get(name, 0.0) for name in talk), summary.transfer)
        found["pipeline bubble"] = (spent.get("pipeline bubble", 0.0), summary.bubble)
    return {name: pair for name, pair in found.items() if max(pair) > 1e-6}


def _spent(recipe: Recipe, gpu: Gpu) -> dict[str, float]:
    try:
        shape, layout, sequence = from_recipe(recipe)
        software = program(program_of(recipe.train))
        return plan_step(shape, layout, gpu, catalogue.fabric(FABRIC), software, Worksheet("profile"), sequence).spent
    except UserError:
        return {}
