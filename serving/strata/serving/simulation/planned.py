"""Engines of a simulation, by the planner's model or by a calibration."""

from dataclasses import dataclass

from strata.planner.catalogue.shape import Shape
from strata.planner.serving.capacity import Link, transfer
from strata.planner.serving.engine_step import CHUNK, Precision, describe
from strata.planner.serving.step_times import StepTimes
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError
from strata.platform.hardware.specs import Fabric, Gpu
from strata.serving.simulation.calibration import Calibration
from strata.serving.simulation.engine import Times

# Strata's gateways and the front end of a replica, fitted with the host's times of `engine_step.py` to an endpoint of 1.04B on an
# H200, where the TTFT of 512 tokens is 8.8 ms and prefill takes 3 ms of it. The planner's `REQUEST_S` is of bare vLLM.
REQUEST_S = 5e-3
FRONT_REQUEST_S = 0.5e-3
FRONT_TOKEN_S = 29e-6


@dataclass(frozen=True)
class Model:
    """An engine's times and sizes, from the planner or a calibration."""

    times: Times
    kv_tokens: int
    context: int
    request_s: float
    handoff_s: float
    transfer_token_s: float
    step_tokens: int = CHUNK
    front_request_s: float = 0.0
    front_token_s: float = 0.0
    request_spread: float = 0.0
    async_scheduling: bool = True  # vLLM's default on GPUs


def calibrated(found: Calibration) -> Model:
    return Model(
        found,
        found.kv_tokens,
        found.context,
        found.request_s,
        found.handoff_s,
        found.transfer_token_s,
        found.step_tokens or CHUNK,
        found.front_request_s,
        found.front_token_s,
        found.request_spread,
        found.async_scheduling,
    )


def plan(
    shape: Shape,
    gpu: Gpu,
    fabric: Fabric,
    link: Link = "fabric",
    tensor: int = 1,
    precision: Precision = "bf16",
    kv_precision: Precision = "bf16",
    max_sequences: int = 256,
) -> Model:
    worksheet = Worksheet("engine")
    describe(shape, gpu, worksheet, tensor, precision, kv_precision, max_sequences)
    kv_tokens = int(worksheet["kv_space"] // worksheet["kv_bytes_per_token"])
    if kv_tokens < 1:
        raise UserError(
            f"{shape.name} leaves no memory for a KV cache on {tensor} x {gpu.name}.", "Raise --tensor or use --precision fp8."
        )
    worksheet.given("prompt", 1)
    transfer(gpu, fabric, link, worksheet)
    handoff_s = worksheet["handoff_s"]
    return Model(
        StepTimes(worksheet),
        kv_tokens,
        shape.context,
        REQUEST_S,
        handoff_s,
        worksheet["transfer_s"] - handoff_s,
        front_request_s=FRONT_REQUEST_S,
        front_token_s=FRONT_TOKEN_S,
    )
