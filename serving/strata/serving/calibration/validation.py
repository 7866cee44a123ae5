"""Comparison of the simulation with recorded runs of `strata bench serve`.

Covered: the uniform workload at a concurrency, on one replica with one GPU of the catalogue. Nothing is fitted to the run: the
step times are the planner's. A recorded run has no model shape, so the recipe it was made with is needed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.planner.catalogue.shape import Shape
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware
from strata.platform.hardware.specs import Fabric, Gpu
from strata.serving.bench.clients.load import Level
from strata.serving.bench.clients.workloads import Workload
from strata.serving.calibration.replay import requests
from strata.serving.simulation import planned
from strata.serving.simulation.endpoint import Setup, Simulation
from strata.serving.simulation.engine import EngineSettings

BLOCK = 16
CONTENDERS = ("vllm", "strata")
METRICS = ("tokens_per_s", "ttft_p50", "itl_p50")


@dataclass(frozen=True)
class Row:
    contender: str
    concurrency: int
    metric: str
    recorded: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.recorded - 1


def read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.", "Name a file that 'strata bench serve' wrote.") from None
    if not isinstance(record, dict) or record.get("benchmark") != "serve":
        raise UserError(f"{path} is no result of 'strata bench serve'.", "Name a file that it wrote.")
    if record["settings"]["workload"]["name"] != "uniform":
        raise UserError(f"{path} is not of the uniform workload.", "Name a run with --workload uniform.")
    return record


def gpu_of(record: dict[str, Any], path: Path) -> Gpu:
    """The catalogue's entry for the GPU of a run. The planner has no model of CPU engines."""
    gpus = record["machine"]["gpus"]
    name = gpus[0].split(",")[0].removeprefix("NVIDIA ").split()[0].lower() if gpus else None
    if name is None:
        raise UserError(f"{path} was recorded on CPUs, and the planner has no model of CPU engines.", "Name a run on GPUs.")
    return hardware.gpu(name)


def compare(record: dict[str, Any], shape: Shape, gpu: Gpu, fabric: Fabric) -> Iterator[Row]:
    settings = record["settings"]
    sequences = (settings.get("serve") or {}).get("max_sequences", 256)
    model = planned.plan(shape, gpu, fabric, max_sequences=sequences)
    engine = EngineSettings(
        blocks=model.kv_tokens // BLOCK,
        block_size=BLOCK,
        max_sequences=sequences,
        step_tokens=max(model.step_tokens, sequences),
        prefix_caching=False,  # as in the run: no prompt repeats another
        async_scheduling=model.async_scheduling,
    )
    setup = Setup(
        times=model.times,
        decode_replicas=1,
        decode_engine=engine,
        max_queue=sequences,
        context=model.context,
        request_s=model.request_s,
        front_request_s=model.front_request_s,
        front_token_s=model.front_token_s,
    )
    workload = Workload(**settings["workload"])
    for contender in CONTENDERS:
        for level in record["contenders"].get(contender, {}).get("levels", []):
            if (concurrency := level["level"]["concurrency"]) is None:
                continue
            load = requests(workload, Level(**level["level"]), settings["seed"], BLOCK, settings["clients"])
            found = Simulation(setup).run(load).summary()
            simulated = {
                "tokens_per_s": found["output_tokens_per_s"],
                "ttft_p50": found["ttft_s"]["p50"],
                "itl_p50": found["itl_s"]["p50"],
            }
            for metric in METRICS:
                yield Row(contender, concurrency, metric, level["summary"][metric], simulated[metric])
