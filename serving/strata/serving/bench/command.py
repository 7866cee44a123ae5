"""The command `strata bench serve`. Light imports only: the command line loads this module for its help."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe_file import Overrides

if TYPE_CHECKING:
    from strata.serving.bench.clients.load import Level
    from strata.serving.bench.clients.workloads import Name, Workload

Number = TypeVar("Number", int, float)


def bench_serve(
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Serve this Hugging Face model folder.")] = None,
    run: Annotated[str | None, typer.Option(help="Serve the export of this run. Default: the newest with an export.")] = None,
    dummy_model_wanted: Annotated[
        bool, typer.Option("--dummy-model", help="Serve random weights in the shape of the recipe's model.")
    ] = False,
    recipe: Annotated[str | None, typer.Option(help="Recipe for the serve section. Default: the run's own, else laptop.")] = None,
    contenders: Annotated[
        str | None,
        typer.Option(
            help="Servers to compare, such as vllm,ray,strata. Strata also with overrides: "
            "strata-pd+serve.prefill.sm_share=0.25. Default: all."
        ),
    ] = None,
    workload: Annotated[str, typer.Option(help="uniform, mixed (short prompts and long ones) or multiturn.")] = "uniform",
    concurrency: Annotated[
        str | None, typer.Option(help="Concurrency of each level. Default: 1,16,64,256 on GPUs, 1,4,16 on CPUs.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Poisson loads in requests per second, such as 4,8.")] = None,
    input: Annotated[
        int | None, typer.Option(help="Tokens per prompt. Default: 512, at most half of the context.", min=1)
    ] = None,
    output: Annotated[
        int | None, typer.Option(help="Tokens per answer. Default: 128, at most a quarter of the context.", min=2)
    ] = None,
    long_input: Annotated[int, typer.Option(help="Tokens per long prompt in 'mixed'.", min=1)] = 8192,
    long_share: Annotated[float, typer.Option(help="Share of the long prompts in 'mixed'.", min=0, max=1)] = 0.1,
    turns: Annotated[int, typer.Option(help="Turns per conversation in 'multiturn'.", min=2)] = 4,
    requests: Annotated[
        int | None,
        typer.Option(help="Requests per level. Default: --waves times the concurrency, which counts as 6 if lower.", min=1),
    ] = None,
    waves: Annotated[int, typer.Option(help="Requests per level and unit of concurrency.", min=1)] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds over all contenders; results are medians.", min=1)] = 1,
    side_by_side: Annotated[
        bool,
        typer.Option(
            "--side-by-side", help="Start all contenders first, each with a share of the memory, and drive one after another."
        ),
    ] = False,
    seconds: Annotated[float, typer.Option(help="Duration of a Poisson load without --requests.", min=1)] = 30,
    clients: Annotated[int | None, typer.Option(help="Client processes. Default: half of the cores.", min=1)] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Goodput counts requests with a TTFT up to this ...")] = 500,
    slo_itl_ms: Annotated[float, typer.Option(help="... and a mean ITL up to this.")] = 50,
    cross_check: Annotated[bool, typer.Option("--cross-check", help="Drive one level with 'vllm bench serve' too.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the Poisson arrival times.", min=0)] = 0,
    json: Annotated[Path | None, typer.Option(help="The JSON file to write. Default: .strata/bench/serve.json.")] = None,
    plot: Annotated[Path | None, typer.Option(help="The plot to write. Default: the JSON file's name with .png.")] = None,
) -> None:
    """Compare throughput, TTFT, ITL and goodput of Strata, bare vLLM and Ray Serve LLM on this machine."""
    import signal
    import tempfile

    from rich.console import Console

    from strata.platform.files import cache_dir
    from strata.serving.bench import compare
    from strata.serving.bench.clients.measure import Slo
    from strata.serving.bench.clients.workloads import Workload
    from strata.serving.bench.contenders import dummy_model, subject
    from strata.serving.bench.results import Settings

    name, chosen = _workload(workload), _contenders(contenders)
    if cross_check and name != "uniform":
        raise UserError(
            "--cross-check supports only the uniform workload, because 'vllm bench serve' does.", "Omit --cross-check."
        )
    if dummy_model_wanted and (model or run):
        raise UserError("--dummy-model excludes --model and --run.", "Use only one of them.")
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(highlight=False, width=None if os.isatty(1) else 180)
    json_file = json or cache_dir() / "bench" / "serve.json"
    picture = plot or json_file.with_suffix(".png")
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as temporary:
        if dummy_model_wanted:
            model = Path(temporary) / "dummy"
            with console.status("Writing a model of random weights …"):
                dummy_model.write(model, recipe_file.load(recipe or recipe_file.DEFAULT, overrides or []))
        served = subject.choose(overrides or [], run, model, recipe)
        prompt, answer = input or min(512, served.context // 2), output or min(128, served.context // 4)
        requested = Workload(name, served.vocab, prompt, answer, long_input, long_share, turns)
        if requested.longest > served.context:
            cause = f"The longest prompt and answer are {requested.longest} tokens; the model's context is {served.context}."
            raise UserError(cause, "Lower --input, --output, --long-input or --turns, or raise the model's context.")
        if not concurrency and not rate:
            concurrency = "1,4,16" if served.section.device == "cpu" else "1,16,64,256"
        levels = _levels(requested, concurrency, rate, requests, waves, seconds)
        processes = clients or max(1, (os.cpu_count() or 1) // 2)
        slo = Slo(slo_ttft_ms / 1000, slo_itl_ms / 1000)
        settings = Settings(requested, levels, processes, slo, seed, cross_check, rounds, side_by_side)
        try:
            results = compare.bench(served, chosen, settings, console, json_file, picture)
        except compare.Stopped as stopped:
            if not stopped.results.ran:
                console.print("Stopped before anything was measured.")
            else:
                compare.show(settings, stopped.results, console)
                console.print(f'Stopped. These are the results so far, also written to {json_file} with "partial": true.')
            raise typer.Exit(130) from None
        except KeyboardInterrupt:
            console.print("Stopped before anything was measured.")
            raise typer.Exit(130) from None
    compare.show(settings, results, console)
    console.print(f"written to {json_file} and {picture}")


def _workload(name: str) -> "Name":
    from strata.serving.bench.clients.workloads import NAMES

    if found := [known for known in NAMES if known == name]:
        return found[0]
    raise UserError(f"There is no workload '{name}'.", f"Choose one of {', '.join(NAMES)}.")


def _contenders(words: str | None) -> list[str]:
    from strata.serving.bench.contenders.contenders import CONTENDERS, find

    chosen = [word.strip() for word in words.split(",")] if words else list(CONTENDERS)
    for word in chosen:
        find(word)
    return chosen


def _levels(
    workload: "Workload", concurrency: str | None, rate: str | None, requests: int | None, waves: int, seconds: float
) -> "list[Level]":
    from strata.serving.bench.clients import load

    levels = [load.closed(value, requests, waves, workload) for value in _numbers(concurrency, int, "--concurrency")]
    return levels + [load.poisson(value, requests, seconds, workload) for value in _numbers(rate, float, "--rate")]


def _numbers(text: str | None, kind: Callable[[str], Number], option: str) -> list[Number]:
    try:
        values = [kind(part) for part in text.split(",")] if text else []
    except ValueError:
        values = [kind("0")]
    if any(value <= 0 for value in values):
        raise UserError(f"{option} {text} is not a list of positive numbers.", f"Write {option} 4,8.")
    return values


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
