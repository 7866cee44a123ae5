"""Peaks of the device that engines run on: a GPU's by the catalogue, a CPU's measured."""

from dataclasses import dataclass
from typing import Literal

from strata.platform.hardware import catalogue, cpu_peak
from strata.platform.hardware.specs import Gpu
from strata.serving.profile.analysis.summary import EngineSummary

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Machine:
    peak: float | None = None  # FLOP/s in the model's precision
    bandwidth: float | None = None  # bytes per second


def of(engine: EngineSummary) -> Machine:
    """An unknown card has no peaks."""
    facts = engine.engine.facts
    precision = PRECISIONS.get(facts["dtype"])
    if precision is None:
        return Machine()
    if not engine.engine.trace.on_gpu:
        import torch

        kind: Literal["bf16", "fp32"] = "bf16" if precision == "bf16" else "fp32"
        return Machine(cpu_peak.measured(kind, facts["threads"], torch.get_float32_matmul_precision()))
    device = catalogue.device_named(facts["device"])
    if device is None:
        return Machine()
    peak = next((rate for name, rate in device.flops.items() if name == precision), None)
    return Machine(peak, device.bandwidth if isinstance(device, Gpu) else None)
