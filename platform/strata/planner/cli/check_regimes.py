"""Errors of the planner on published figures that no constant was fitted to, by regime: `published/regimes.csv`.

Each row has the arguments of a `strata plan` command. They pass through the command's own parser and checks, so a row that a
user could not plan is refused here as well.

`python -m strata.planner.cli.check_regimes` writes the errors of each regime to `published/errors.json`. Plans print the errors
to expect from this file.
"""

import csv
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from statistics import mean
from typing import Any

import typer
from typer.main import get_command

from strata.planner.cli.options import open_fabric
from strata.planner.cli.plan import plan, planned
from strata.planner.cli.studies import place_of, plan_collectives, plan_serve, served
from strata.planner.layout import Layout
from strata.planner.memory.plan import no_fit_note
from strata.planner.plan import TrainingPlan
from strata.planner.validation.trust import ERRORS, PUBLISHED, Errors
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware

CURVE_BYTES = 2.0**32  # buffer size of the published peak bus bandwidths


@dataclass(frozen=True)
class Row:
    """A published figure with the planner's. `planned` is None where the layout is refused; `note` has the reason."""

    regime: str
    source: str
    name: str
    unit: str
    published: float
    planned: float | None
    note: str

    @property
    def error(self) -> float | None:
        """Relative error in time (or memory). Below 0, the planner is too fast (or its memory too small)."""
        if self.planned is None:
            return None
        return (self.published / self.planned if self.unit in RATES else self.planned / self.published) - 1


RATES = ("tokens_s_gpu", "model_tflops", "mfu_pct", "tokens_s", "busbw_GB_s")
TRAINED: dict[str, Callable[[TrainingPlan], float]] = {
    "step_s": lambda found: found.step.seconds,
    "tokens_s_gpu": lambda found: found.step.tokens_per_s / found.layout.gpus,
    "model_tflops": lambda found: found.step.model_flops / found.step.seconds / found.layout.gpus / 1e12,
    "mfu_pct": lambda found: found.step.mfu * 100,
    "M GPU-hours": lambda found: found.budget.gpu_hours / 1e6 if found.budget else 0.0,
    "GiB_reserved": lambda found: _allocated(found) / 2**30,
    "GB": lambda found: _allocated(found) / 1e9,
}
SERVED: dict[str, Callable[[Any], float]] = {
    "itl_ms": lambda found: found.aggregated.itl_s * 1e3,
    "ttft_ms (p50)": lambda found: found.aggregated.ttft_p50_s * 1e3,
    "tokens_s": lambda found: found.tokens_per_s,
}


def errors(rows: Sequence[Row]) -> Errors:
    found = [row.error for row in rows if row.error is not None]
    return Errors(len(found), mean(map(abs, found)), mean(found), min(found), max(found))


@cache
def regime(name: str) -> tuple[Row, ...]:
    return tuple(_row(line) for line in _lines() if line["regime"] == name)


def regime_names() -> list[str]:
    return list(dict.fromkeys(line["regime"] for line in _lines()))


@cache
def _lines() -> list[dict[str, str]]:
    with (PUBLISHED / "regimes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _row(line: dict[str, str]) -> Row:
    words = [str(PUBLISHED / word) if word.startswith("cfg/") else word for word in shlex.split(line["command"])]
    value: float | None
    try:
        value, fits = _plan(words, line["metric"], line["row"])
    except UserError as error:
        value, fits = None, f"refused: {error.cause}"
    note = "; ".join(each for each in (fits, line["note"]) if each)
    return Row(line["regime"], line["source"], line["row"], line["metric"], float(line["published"]), value, note)


def _plan(words: list[str], metric: str, name: str) -> tuple[float, str]:
    """The planned figure, and a note if the plan does not fit."""
    match words[0]:
        case "serve":
            return SERVED[metric](served(**_params(plan_serve, words[1:], ("json", "explain", "plot"))[0])), ""
        case "collectives":
            return _collective(_params(plan_collectives, words[1:])[0], metric, name), ""
    found = training(words)
    return TRAINED[metric](found), no_fit_note(found.memory)


def training(words: list[str]) -> TrainingPlan:
    """Plan for the arguments of `strata plan`."""
    params, rest = _params(plan, words, ("json", "explain", "plot"))
    given = {each.name: params.pop(each.name) for each in fields(Layout)}
    return planned(given, rest, **params)


def _collective(params: dict[str, Any], metric: str, name: str) -> float:
    from strata.planner.collectives.cost import cost, links

    card = hardware.gpu(params["gpu"])
    size = float(name.removesuffix(" KiB")) * 1024 if metric == "time_us" else CURVE_BYTES
    found = cost(
        params["kind"], size, place_of(params["ranks"], params["inside"], card), links(card, open_fabric(params["fabric"], card))
    )
    return found.seconds * 1e6 if metric == "time_us" else found.busbw / 1e9


def _allocated(found: TrainingPlan) -> float:
    """Bytes reserved by torch's allocator, without the CUDA context and NCCL."""
    return found.memory.peak - found.memory.fullest.runtime


def _params(command: Callable[..., None], words: list[str], without: tuple[str, ...] = ()) -> tuple[dict[str, Any], list[str]]:
    """Parameters of a command, parsed as on the command line."""
    ctx = _parser(command).make_context(command.__name__, list(words))
    return {name: value for name, value in ctx.params.items() if name not in without}, list(ctx.args)


@cache
def _parser(command: Callable[..., None]) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return get_command(app)


def as_json() -> str:
    """Errors of each regime as JSON, to four digits."""
    found = {name: asdict(errors(regime(name))) for name in regime_names()}
    rounded = {name: {key: round(value, 4) for key, value in each.items()} for name, each in found.items()}
    return json.dumps(rounded, indent=2) + "\n"


if __name__ == "__main__":
    ERRORS.write_text(as_json())
