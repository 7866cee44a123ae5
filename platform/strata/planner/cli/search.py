"""`strata plan search`. Light imports only: the command line loads this module to print its help."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType
from rich.text import Text

from strata.planner import ranges
from strata.planner.cli.options import (
    GPU,
    Explain,
    FabricName,
    GpuName,
    Json,
    Model,
    Plot,
    Price,
    Program,
    Seq,
    answer,
    number,
    open_fabric,
    open_gpu,
    open_model,
    usual_sequence,
)
from strata.planner.cli.output import jsonable, write_text
from strata.planner.layout import Layout
from strata.planner.units import count, dollars, share, short, show
from strata.platform.errors import UserError, shown

if TYPE_CHECKING:
    from rich.table import Table

    from strata.planner.search.best_first import Candidate
    from strata.planner.search.search import SearchResult

TOKENS = "1T"
OPTIONAL = ("tensor", "pipeline", "schedule", "sequence", "ring", "expert", "recompute")
BATCH_TOKENS = "16M"  # Llama 3's, in the second half of its training


def plan_search(
    gpus: Annotated[str, typer.Option(help="GPUs available (fewer may be used), or counts to choose from: 512,1024.")],
    model: Model = None,
    gpu: GpuName = GPU,
    fabric: FabricName = None,
    program: Program = None,
    goal: Annotated[
        Literal["time", "cost", "gpus"], typer.Option(help="Minimize training time, cost, or the number of GPUs.")
    ] = "time",
    batch_tokens: Annotated[str | None, typer.Option(help=f"Approximate tokens per step.  [default: {BATCH_TOKENS}]")] = None,
    batch: Annotated[int | None, number("Exact sequences per step, instead of --batch-tokens.", ranges.BATCH, "--batch")] = None,
    seq: Seq = None,
    tokens: Annotated[str | None, typer.Option(help=f"Token budget, such as 15T.  [default: {TOKENS}]")] = None,
    deadline: Annotated[float | None, number("Days for the token budget (--goal gpus).", ranges.DEADLINE, "--deadline")] = None,
    precision: Annotated[Literal["fp32", "fp16", "bf16", "fp8"], typer.Option(help="Precision of the matrix products.")] = "bf16",
    top: Annotated[int, number("Layouts to list.", ranges.TOP, "--top")] = 10,
    write: Annotated[Path | None, typer.Option(help="Write the best layout as a recipe for 'strata train'.")] = None,
    price: Price = None,
    json: Json = None,
    explain: Explain = False,
    plot: Plot = None,
) -> None:
    """Search for the best layouts by time, cost or GPU count, and print the Pareto front."""
    from strata.planner.catalogue.software import program as open_program
    from strata.planner.memory.activations import OURS
    from strata.planner.search.search import search
    from strata.planner.search.space import ANYTHING, STRATA

    shape, card = open_model(model), open_gpu(gpu, price)
    software, net = (
        open_program(program if program is not None else "strata" if write else "megatron-core"),
        open_fabric(fabric, card),
    )
    if batch is not None and batch_tokens is not None:
        raise UserError("--batch and --batch-tokens both set the batch.", "Use one of them.")
    if precision not in card.flops:
        raise UserError(f"{card.name} does not compute in {precision}.", f"Use --precision {' or '.join(card.flops)}.")
    length = usual_sequence(shape) if seq is None else seq
    budget = count(TOKENS if tokens is None else tokens, "--tokens")
    found = search(
        shape,
        card,
        net,
        _numbers(gpus),
        software,
        batch=batch,
        batch_tokens=None
        if batch is not None
        else count(BATCH_TOKENS if batch_tokens is None else batch_tokens, "--batch-tokens"),
        sequence=length,
        goal=goal,
        budget_tokens=budget,
        deadline_days=deadline,
        limits=STRATA if software.name in OURS else ANYTHING,
        precision=precision,
        top=top,
    )
    worksheet = None
    if explain:
        from strata.planner.plan import plan_training

        worksheet = plan_training(shape, found.best[0].layout, length, card, net, software, tokens=budget).worksheet
    from strata.planner.cli.report import doubt
    from strata.planner.validation import trust

    trusted = trust.of_training(shape, found.best[0].layout, length, card, software)
    title = f"{shape.name} ({short(shape.parameters())} parameters) on {card.name}: {short(budget)} tokens"

    def parts(_: object) -> list[RenderableType]:
        return [Text(title, "bold"), best_table(found), front_table(found), *doubt(trusted), summary(found)]

    def data() -> dict[str, Any]:
        about = {"model": shape.name, "gpu": card.name, "fabric": net.name, "goal": goal, "tokens": budget}
        return about | {**jsonable(found), "trust": trusted}

    def pictures(folder: Path) -> list[Path]:
        from strata.planner.cli import plots

        paths = folder / "pareto.png", folder / "gpus.png"
        plots.pareto(_choices([*found.by_gpus, *found.best]), _choices(found.pareto), paths[0], title)
        plots.cost_against_gpus(_choices(found.by_gpus), paths[1], title)
        return list(paths)

    if write:
        from strata.planner.recipes import as_recipe
        from strata.platform import recipe_file

        recipe = as_recipe(shape, found.best[0].layout, length, None if tokens is None else budget)
        write_text(write, recipe_file.dump(recipe))
    answer(parts, data, json, explain, worksheet, plot, pictures, [write] if write else [])


def best_table(found: "SearchResult") -> "Table":
    notes = []
    if any(one.layout.sequence_parallel for one in found.best):
        notes.append("s: with sequence parallelism")
    if any(one.idle for one in found.best):
        notes.append(f"the remaining GPUs of {found.best[0].gpus:,} are idle")
    rows = [
        {
            "GPUs": f"{one.layout.gpus:,}",
            **_cut(one.layout),
            "micro": f"{one.layout.micro_batches} x {one.layout.micro_batch}",
            "ZeRO": f"{one.layout.zero}",
            "recompute": one.layout.recompute.replace("none", "-"),
            "step": show(one.step.seconds, "s"),
            "MFU": share(one.step.mfu),
            "memory": show(one.peak, "B"),
            **_price(one),
        }
        for one in found.best
    ]
    return _as_table("best layouts", rows, "; ".join(notes))


def front_table(found: "SearchResult") -> "Table":
    rows = [
        {
            "GPUs": f"{one.gpus:,}",
            **_cut(one.layout),
            "tokens/s": short(one.step.tokens_per_s),
            "MFU": share(one.step.mfu),
            **_price(one),
        }
        for one in found.pareto
    ]
    return _as_table("Pareto front of time and cost", rows, "")


def _as_table(title: str, rows: list[dict[str, str]], note: str) -> "Table":
    """Table of layouts, without dimensions that none of them uses."""
    from strata.planner.cli.tables import grid

    names = [name for name in rows[0] if name not in OPTIONAL or any(row[name] not in ("1", "-") for row in rows)]
    table = grid(title, [], names, note)
    for place, row in enumerate(rows):
        table.add_row(*(row[name] for name in names), style="" if place else "bold")
    return table


def _cut(layout: Layout) -> dict[str, str]:
    return {
        "data": f"{layout.data}",
        "tensor": f"{layout.tensor}" + "s" * layout.sequence_parallel,
        "pipeline": f"{layout.pipeline}",
        "schedule": _schedule(layout),
        "sequence": f"{layout.sequence}",
        "ring": f"{layout.context}",
        "expert": f"{layout.expert}",
    }


def _schedule(layout: Layout) -> str:
    if layout.pipeline == 1:
        return "-"
    return layout.schedule + (f"-{layout.interleave}" if layout.schedule == "interleaved" else "")


def summary(found: "SearchResult") -> str:
    return f"{found.considered:,} layouts evaluated in {show(found.seconds, 's')}; lower bounds excluded the others"


def _price(one: "Candidate") -> dict[str, str]:
    assert one.days is not None and one.dollars is not None  # the command always sets a budget
    return {"days": f"{one.days:,.3g}" if one.days < 1000 else f"{one.days:,.0f}", "cost": dollars(one.dollars)}


def _choices(candidates: "list[Candidate]") -> list[Any]:
    from strata.planner.cli.plots import Choice

    return [Choice(one.gpus, one.days or 0.0, one.dollars or 0.0) for one in candidates]


def _numbers(text: str) -> int | tuple[int, ...]:
    words = text.split(",")
    if len(words) > ranges.CHOICES:
        raise UserError(f"--gpus has {len(words):,} counts to choose from.", f"List at most {ranges.CHOICES}.")
    numbers = [count(word, "--gpus", ranges.GPUS) for word in words]
    for word, gpus in zip(words, numbers, strict=True):
        if gpus != int(gpus):
            raise UserError(f"--gpus {shown(word)} is not a whole number.", f"Use --gpus {max(1, round(gpus))}.")
    return tuple(map(int, numbers)) if len(numbers) > 1 else int(numbers[0])
