"""Points of a calibration from a file: a record of `strata bench serve`, or one of `strata simulate calibrate`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strata.planner.catalogue import library
from strata.planner.serving.engine_step import describe
from strata.planner.serving.step_times import StepTimes
from strata.planner.worksheet import Worksheet
from strata.platform import benchmark_record, recipe_file
from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.serving.bench.clients import load
from strata.serving.bench.clients.load import Level
from strata.serving.bench.clients.workloads import Workload
from strata.serving.calibration import fit, validation
from strata.serving.calibration.figures import NAMES, Figures
from strata.serving.calibration.fit import Point
from strata.serving.calibration.replay import Engines
from strata.serving.simulation.calibration import Calibration

BLOCK, STEP_TOKENS, SEQUENCES = 16, 8192, 256  # vLLM's defaults on GPUs
RECORDED = {"itl_mean": "mean_itl_p50"}  # the median of the requests' means
UNBOUNDED = 10**9  # tokens; a record does not have the size of the KV cache


def points(path: Path, contender: str, concurrency: frozenset[int] = frozenset()) -> list[Point]:
    """Levels of one contender; with `concurrency`, its closed loops of these alone."""
    try:
        record: Any = json.loads(path.read_text())
        settings, levels = record["settings"], record["contenders"][contender]["levels"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} has no levels of {contender}.", "Name a file that 'strata bench serve' wrote, and one of its contenders."
        ) from None
    workload = Workload(**settings["workload"])
    found = []
    for place, each in enumerate(levels):
        level, summary = Level(**each["level"]), each["summary"]
        if concurrency and level.concurrency not in concurrency:
            continue
        measured = Figures(**{name: summary.get(RECORDED.get(name, name)) for name in NAMES})
        seeds = tuple(load.seed(settings["seed"], number, len(levels), place) for number in range(settings["rounds"]))
        name, same = f"{workload.name}, {level.label}", (level,) * len(seeds)
        found.append(Point(name, workload, same, seeds, (measured,), settings["clients"]))
    if not found:
        raise UserError(f"{path} has no such levels of {contender}.", "Name concurrencies of the record.")
    return found


def engines(
    path: Path, contender: str, points: list[Point], max_sequences: int | None, step_tokens: int | None, prefill: int
) -> Engines:
    """Settings of a recorded endpoint, where the command line does not have them."""
    gpu = bool(json.loads(path.read_text())["machine"]["gpus"])
    return Engines(
        BLOCK,
        max_sequences or SEQUENCES,
        step_tokens or STEP_TOKENS,
        prefill=prefill,
        prefix_caching=points[0].workload.prefix_caching,
        gpu=gpu,
        full_graphs=gpu and contender.startswith("strata"),
    )


def known_terms(path: Path, recipe: str) -> dict[str, float]:
    """Terms that a record does not show: the spread of requests, for lack of tails, and those that need prompts of several
    lengths. These are the planner's, except on CPUs, of which it has no model."""
    record = json.loads(path.read_text())
    known = {"request_spread": 0.0}
    if not record["machine"]["gpus"]:
        return known
    worksheet = Worksheet("engine")
    describe(library.from_recipe(recipe_file.load(recipe, []).model, recipe), validation.gpu_of(record, path), worksheet)
    return known | StepTimes(worksheet).gpu_terms


def rows(calibration: Calibration, engines: Engines, points: list[Point]) -> list[dict[str, Any]]:
    """Measured and simulated figures of each load, with their ratios."""
    found = []
    for point in points:
        simulated = point.simulated(calibration, engines)
        ratios = {name: 1 + error for name, error in fit.errors(point.figures, simulated).items()}
        level = asdict(point.level)
        found.append(
            {"load": point.name, "level": level, "workload": asdict(point.workload), "measured": asdict(point.figures)}
            | {"rounds": [asdict(each) for each in point.rounds], "simulated": asdict(simulated), "ratios": ratios}
        )
    return found


def write(path: Path, calibration: Calibration, engines: Engines, fitted: list[dict[str, Any]]) -> None:
    body = {"engine": calibration.model_dump(), "endpoint": asdict(engines), "loads": fitted}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(benchmark_record.header("calibration") | body, indent=2))
