"""Runs `strata bench dit`, prints its tables and writes its JSON after every figure."""

import json
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from strata.platform import benchmark_record, runs
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.serving.diffusion.bench import layouts, one_gpu, report, trained
from strata.serving.diffusion.bench.contenders import NAMES
from strata.serving.diffusion.bench.models import FULL_SIZE, SMALL, PictureModel
from strata.serving.diffusion.pipeline import INDEX

COMPILE_SHARE = 0.4  # of the time limit, for compilation before anything is timed
Save = Callable[[], None]


def on_one_gpu(rounds: int, limit_s: float, path: Path | None) -> None:
    if not torch.cuda.is_available():
        raise UserError("There is no GPU on this machine.", "Leave out --gpu to measure layouts on CPU workers.")
    full_size(FULL_SIZE, torch.device("cuda"), torch.bfloat16, rounds, limit_s, path)


def full_size(
    models: Sequence[PictureModel], device: torch.device, dtype: torch.dtype, rounds: int, limit_s: float, path: Path | None
) -> None:
    """Attention, then pictures of all models. Whatever fails or is not reached in time is noted, and the rest goes on."""
    _quiet()
    clock = one_gpu.Clock(limit_s)
    run: dict[str, Any] = {**_header("strata bench dit --gpu"), "attention": [], "pictures": [], "not_run": []}
    save, console = _saving(run, path), Console(highlight=False)
    with console.status("compiling"):
        remark = one_gpu.compile_ahead(models, device, dtype, limit_s * COMPILE_SHARE)
    run["compiled_s"] = limit_s - clock.left
    run["not_run"] += [remark] if remark else []
    save()
    _attention(run, device, clock, save, console)
    measure = partial(one_gpu.measure_model, names=NAMES, device=device, dtype=dtype, rounds=rounds, clock=clock)
    for model in models:
        if clock.left < 0:
            run["not_run"].append(f"{model.name}: time limit")
            save()
            continue
        row = _measured(run, model, measure, save)
        console.print(report.picture_table(asdict(row)))
    _written(run, path, console)


def _attention(run: dict[str, Any], device: torch.device, clock: one_gpu.Clock, save: Save, console: Console) -> None:
    try:
        for case in one_gpu.attention_rows(device, clock):
            run["attention"].append(case)
            save()
    except Exception as error:
        run["not_run"].append(f"attention: {one_gpu.first_line(error)}")
        save()
    console.print(report.attention_table(run["attention"]))


def _measured(
    run: dict[str, Any], model: PictureModel, measure: Callable[..., one_gpu.PictureRow], save: Save
) -> one_gpu.PictureRow:
    place = len(run["pictures"])

    def save_row(row: one_gpu.PictureRow) -> None:
        run["pictures"][place:] = [asdict(row)]
        save()

    return measure(model, save=save_row)


def by_layout(rounds: int, path: Path | None, model: PictureModel = SMALL) -> None:
    _quiet()
    run: dict[str, Any] = {**_header(f"strata bench dit --rounds {rounds}"), "layouts": [], "not_run": []}
    if find_spec("xfuser") is None:
        run["not_run"].append("xDiT: the package xfuser is not installed")
    save, console = _saving(run, path), Console(highlight=False)
    with layouts.Workers(model, layouts.MOST_WORKERS) as workers, console.status("measuring"):
        for rows in layouts.measure(workers, rounds):
            run["layouts"] = [asdict(row) for row in rows]
            save()
    console.print(report.layouts_table(run["layouts"], model))
    _written(run, path, console)


def by_quality(name: str | None, captions: Path, to: Path, path: Path | None) -> None:
    """Quality of a run's pictures by the ways that are not exact."""
    _quiet()
    run_of = runs.find(name) if name else runs.newest_with_export()
    if not (run_of.export / INDEX).is_file():
        raise UserError(f"Run '{run_of.name}' has no exported picture model.", "Name a finished picture run with --run.")
    texts = trained.captions_of(captions)
    run: dict[str, Any] = {**_header("strata bench dit --captions"), "quality": [], "not_run": []}
    target = path or cache_dir() / "bench" / "dit-quality.json"
    save, console = _saving(run, target), Console(highlight=False)
    with console.status("drawing"):
        for row in trained.measure(run_of.export, texts, to):
            run["quality"].append(asdict(row))
            save()
    console.print(report.quality_table(run["quality"], run_of.name, len(texts)))
    console.print(f"pictures in {to}: judge those of generated captions with 'strata eval pictures {to}'", markup=False)
    _written(run, target, console)


def _header(command: str) -> dict[str, Any]:
    header = benchmark_record.header("dit") | {"command": command}
    if torch.cuda.is_available():
        header["machine"]["cuda"] = torch.version.cuda
    return header


def _saving(run: dict[str, Any], path: Path | None) -> Save:
    target = path or cache_dir() / "bench" / "dit.json"
    return lambda: write_atomic(target, json.dumps(run, indent=2) + "\n")


def _written(run: dict[str, Any], path: Path | None, console: Console) -> None:
    for remark in run["not_run"]:
        console.print(f"not run: {remark}", markup=False)
    console.print(f"written to {path or cache_dir() / 'bench' / 'dit.json'}", markup=False)


def _quiet() -> None:
    """Without the libraries' remarks on tokenizers and optional packages, which no figure depends on."""
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
