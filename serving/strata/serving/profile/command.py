"""`strata profile serve`. Imports nothing heavy: every command loads this module.

Where the package is not installed and so has no entry points: `python -m strata.serving.profile.command --help`.
"""

from pathlib import Path
from typing import Annotated

import typer

from strata.platform.errors import UserError
from strata.platform.recipe_file import Overrides


def profile_serve(
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Serve the export of this run. Default: the newest with an export.")] = None,
    model: Annotated[Path | None, typer.Option(help="Serve this Hugging Face model folder.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe for the serve section. Default: the run's own, else laptop.")] = None,
    requests: Annotated[int, typer.Option(help="Requests to profile.", min=1)] = 32,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.", min=1)] = 8,
    rate: Annotated[float | None, typer.Option(help="Poisson load in requests per second, in place of --concurrency.")] = None,
    input: Annotated[int | None, typer.Option(help="Tokens per prompt. Default: 512, at most half the context.", min=1)] = None,
    output: Annotated[
        int | None, typer.Option(help="Tokens per answer. Default: 64, at most a quarter of the context.", min=2)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the Poisson arrival times.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: profile/serve in the cache folder.")] = None,
) -> None:
    """Serve under load and profile the engines: findings, a report, and traces for Perfetto."""
    import logging
    import signal

    from rich.console import Console

    from strata.platform.files import cache_dir
    from strata.serving.bench.clients import load
    from strata.serving.bench.clients.workloads import Workload
    from strata.serving.bench.contenders import subject
    from strata.serving.profile import session
    from strata.serving.profile.report import present

    if rate is not None and rate <= 0:
        raise UserError(f"--rate {rate:g} is not positive.", "Write --rate 4.")
    served = subject.choose(overrides or [], run, model, recipe)
    prompt, answer = input or min(512, served.context // 2), output or min(64, served.context // 4)
    workload = Workload("uniform", served.vocab, prompt, answer, prompt, 0.0, 2)
    if workload.longest > served.context:
        cause = f"A prompt and its answer are {workload.longest} tokens; the model's context is {served.context}."
        raise UserError(cause, "Lower --input or --output.")
    level = load.poisson(rate, requests, 1.0, workload) if rate else load.closed(concurrency, requests, 1, workload)
    console, target = Console(highlight=False, soft_wrap=True), out or cache_dir() / "profile" / "serve"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.disable(logging.INFO)  # Ray and the HTTP clients log each of their steps
    try:
        with console.status("") as status:
            records = session.profile(served, session.Load(workload, level, seed, session.processes()), target, status.update)
    except KeyboardInterrupt:
        console.print("Stopped before the profile was written.")
        raise typer.Exit(130) from None
    present.report(target, records, console)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(profile_serve)
    app()
