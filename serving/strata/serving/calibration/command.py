"""The commands `strata simulate calibrate` and `strata simulate validate`. Light imports only: the command line loads this module
for its help."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.planner.cli.options import Json, answer, open_fabric
from strata.platform.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

BAR = 0.1  # most error of throughput and of the median time to first token
ENDPOINT, LOADS, RECORD = "Endpoint", "Loads", "Recorded benchmark"

Url = Annotated[
    str | None,
    typer.Option(help="A running endpoint with OpenAI's API, such as http://127.0.0.1:8000.", rich_help_panel=ENDPOINT),
]
Model = Annotated[
    str | None,
    typer.Option(help="Model of an endpoint that has several. Default: its main one.", rich_help_panel=ENDPOINT),
]
Start = Annotated[
    str | None,
    typer.Option(
        help="Start this contender of 'strata bench serve', such as vllm or strata, with random weights.",
        rich_help_panel=ENDPOINT,
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        help="Recipe of the endpoint that --start starts (default: laptop) or of the record (h200).", rich_help_panel=ENDPOINT
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change of the recipe, such as model.layers=6. Repeatable.", rich_help_panel=ENDPOINT),
]
MaxSequences = Annotated[
    int | None,
    typer.Option(
        help="Concurrent sequences per engine (max_num_seqs). Default: the recipe's, or 256.", min=1, rich_help_panel=ENDPOINT
    ),
]
StepTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens per step (max_num_batched_tokens). Default: 8,192; on CPUs 2,048.", min=1, rich_help_panel=ENDPOINT
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(help="Tokens that the KV cache holds, if the endpoint does not report them.", min=1, rich_help_panel=ENDPOINT),
]
Prefill = Annotated[int, typer.Option(help="Prefill replicas of the endpoint.", min=0, rich_help_panel=ENDPOINT)]
Cpu = Annotated[
    bool, typer.Option("--cpu", help="The endpoint at --url runs on CPUs: synchronous scheduling.", rich_help_panel=ENDPOINT)
]
Concurrency = Annotated[int, typer.Option(help="Most requests at a time.", min=4, rich_help_panel=LOADS)]
Context = Annotated[
    int | None,
    typer.Option(help="Most tokens of a request. Default: the model's context, at most 4,096.", min=128, rich_help_panel=LOADS),
]
Rounds = Annotated[int, typer.Option(help="Rounds over all loads; figures are medians.", min=1, rich_help_panel=LOADS)]
Waves = Annotated[
    int, typer.Option(help="Requests of a closed loop, in multiples of its concurrency.", min=1, rich_help_panel=LOADS)
]
Clients = Annotated[int | None, typer.Option(help="Client processes. Default: half of the cores.", min=1, rich_help_panel=LOADS)]
Seed = Annotated[int, typer.Option(help="Seed of the prompts and arrivals.", min=0, rich_help_panel=LOADS)]
Contender = Annotated[str, typer.Option(help="Contender of a recorded benchmark.", rich_help_panel=RECORD)]


def simulate_calibrate(
    url: Url = None,
    model: Model = None,
    start: Start = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Fit a file of 'strata bench serve' instead of an endpoint.", rich_help_panel=RECORD),
    ] = None,
    contender: Contender = "strata",
    levels: Annotated[
        str | None,
        typer.Option(help="Concurrencies of the record to fit, such as 1,16,256. Default: all.", rich_help_panel=RECORD),
    ] = None,
    max_sequences: MaxSequences = None,
    step_tokens: StepTokens = None,
    kv_tokens: KvTokens = None,
    prefill: Prefill = 0,
    cpu: Cpu = False,
    concurrency: Concurrency = 16,
    context: Context = None,
    rounds: Rounds = 5,
    waves: Waves = 8,
    clients: Clients = None,
    seed: Seed = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Calibration file to write.")] = Path("calibration.json"),
) -> None:
    """Measure an endpoint, and fit the times of simulated engines to it: for 'strata simulate --calibration'."""
    from rich.console import Console

    from strata.serving.calibration import loads, recorded, session

    console = Console(highlight=False)
    _one_of(url, start, record)
    _require_url(model, url)
    if record is not None:
        chosen = frozenset(_whole(word) for word in levels.split(",")) if levels else frozenset[int]()
        points = recorded.points(record, contender, chosen)
        engines = recorded.engines(record, contender, points, max_sequences, step_tokens, prefill)
        sizes = kv_tokens or recorded.UNBOUNDED, context or recorded.UNBOUNDED
        fitted = session.fitted(points, engines, *sizes, console, recorded.known_terms(record, recipe or "h200"))
    else:
        given = session.Given(max_sequences, step_tokens, kv_tokens, prefill, context, clients, model, cpu)
        with session.opened(url, start, recipe or "laptop", overrides or [], given) as endpoint:
            points = endpoint.measure(loads.calibration(endpoint.sizes(concurrency, waves)), rounds, seed, console)
            engines = endpoint.engines
            fitted = session.fitted(points, engines, endpoint.kv_tokens, endpoint.context, console)
    rows = recorded.rows(fitted, engines, points)
    recorded.write(output, fitted, engines, rows)
    console.print(table(rows, "Loads of the calibration"))
    console.print(f"written to {output}; 'strata simulate --calibration {output}' uses it")


def simulate_validate(
    record: Annotated[
        Path | None, typer.Argument(help="JSON file of 'strata bench serve' to compare with, instead of an endpoint.")
    ] = None,
    contender: Contender = "strata",
    calibration: Annotated[
        Path | None,
        typer.Option(help="Calibration file. Default: measured in the same rounds; for a record, the planner's step times."),
    ] = None,
    url: Url = None,
    model: Model = None,
    start: Start = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    max_sequences: MaxSequences = None,
    step_tokens: StepTokens = None,
    kv_tokens: KvTokens = None,
    prefill: Prefill = 0,
    cpu: Cpu = False,
    concurrency: Concurrency = 16,
    context: Context = None,
    rounds: Rounds = 5,
    waves: Waves = 8,
    clients: Clients = None,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Compare the simulation with an endpoint under loads that were not fitted, or with a recorded benchmark."""
    from rich.console import Console

    from strata.platform import benchmark_record
    from strata.serving.calibration import loads, recorded, session
    from strata.serving.simulation import calibration as calibrations

    _one_of(url, start, record)
    _require_url(model, url)
    if record is not None and calibration is None:
        _compare_with_planner(record, recipe or "h200", json)
        return
    known = calibrations.load(calibration) if calibration is not None else None
    console = Console(highlight=False, stderr=json is not None)
    if record is not None:
        assert known is not None
        points = recorded.points(record, contender)
        sequences, tokens = max_sequences or known.max_sequences, step_tokens or known.step_tokens
        engines = recorded.engines(record, contender, points, sequences, tokens, prefill)
    else:
        given = session.Given(max_sequences, step_tokens, kv_tokens, prefill, context, clients, model, cpu)
        with session.opened(url, start, recipe or "laptop", overrides or [], given) as endpoint:
            sizes = endpoint.sizes(concurrency, waves)
            # The rounds have the loads of both, so that a slow minute of the machine is part of both.
            first = loads.calibration(sizes)
            points = endpoint.measure([*first, *loads.validation(sizes)], rounds, seed, console)
            engines = endpoint.engines
            if known is None:
                known = session.fitted(points[: len(first)], engines, endpoint.kv_tokens, endpoint.context, console)
            points = points[len(first) :]
    rows = recorded.rows(known, engines, points)
    body = benchmark_record.header("simulation") | {"engine": known.model_dump(), "bar": BAR, "rows": rows}
    answer(lambda _: [table(rows, "Loads that were not fitted")], lambda: body, json)


def _one_of(*choices: object) -> None:
    if sum(each is not None for each in choices) != 1:
        raise UserError("An endpoint or a record is needed, and one of them.", "Set --url to a running endpoint.")


def _require_url(model: str | None, url: str | None) -> None:
    if model is not None and url is None:
        raise UserError("--model names a model of a running endpoint.", "Set --url, or omit --model.")


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise UserError(f"--levels {word} is no whole number.", "Write concurrencies, such as 1,16,256.") from None


def table(rows: list[dict[str, Any]], title: str) -> "Table":
    from rich.table import Table

    from strata.serving.calibration.figures import BARS

    repeated = any(len(row["rounds"]) > 1 for row in rows)
    made = Table("load", "figure", "measured", *["rounds"] * repeated, "simulated", "ratio", "within 10%", title=title)
    for row in rows:
        for place, (name, ratio) in enumerate((name, each) for name, each in row["ratios"].items() if name != "requests_per_s"):
            scale, digits, unit = (1, 0, "") if name == "tokens_per_s" else (1000, 1, ", ms")
            measured, simulated = (f"{scale * row[kind][name]:,.{digits}f}" for kind in ("measured", "simulated"))
            rounds = [scale * each[name] for each in row["rounds"]] if repeated else []
            spread = [f"{min(rounds):,.{digits}f} to {max(rounds):,.{digits}f}"] if rounds else []
            within = ("yes" if abs(ratio - 1) <= BAR else "no") if name in BARS else ""
            made.add_row("" if place else row["load"], name + unit, measured, *spread, simulated, f"{ratio:.2f}", within)
    return made


def _compare_with_planner(record: Path, recipe: str, json: Json) -> None:
    """Nothing is fitted: the step times are the planner's."""
    from rich.table import Table

    from strata.planner.catalogue import library
    from strata.platform import recipe_file
    from strata.serving.calibration import validation

    found = validation.read(record)
    card = validation.gpu_of(found, record)
    shape = library.from_recipe(recipe_file.load(recipe, []).model, recipe)
    rows = list(validation.compare(found, shape, card, open_fabric(None, card)))
    made = Table("contender", "concurrency", "metric", "recorded", "simulated", "error")
    for row in rows:
        scale, digits = (1, 0) if row.metric == "tokens_per_s" else (1000, 1)
        values = (f"{scale * value:,.{digits}f}" for value in (row.recorded, row.simulated))
        unit = "" if scale == 1 else ", ms"
        made.add_row(row.contender, str(row.concurrency), row.metric + unit, *values, f"{row.error:+.0%}")
    answer(lambda _: [made], lambda: {"rows": [{**vars(row), "error": row.error} for row in rows]}, json)
