"""Commands `train` and `export`. Light imports only: `strata --help` loads this module."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import psutil
import typer
from rich.console import Console

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.ray_cluster.watch import ClusterDied
from strata.platform.recipe_file import Overrides
from strata.training import python_api

if TYPE_CHECKING:
    from strata.training.driver import Summary


INTERRUPTED = 130  # exit code that a shell reports for Ctrl-C
RESTARTS = "STRATA_CLUSTER_RESTARTS"  # how often this command's cluster was started again, so far
MOST_RESTARTS = 3


def train(
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name, or a path to one.")] = recipe_file.DEFAULT,
    run: Annotated[str | None, typer.Option(help="The new run's name.")] = None,
    resume: Annotated[str | None, typer.Option(help="Continue this run, by its own recipe.")] = None,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Continue --run if it exists, by the recipe given: for jobs that are retried.")
    ] = False,
) -> None:
    """Train a model and export it. Ctrl-C saves a checkpoint; --resume continues from it."""
    console = Console(highlight=False, soft_wrap=True)
    if resume is not None and (run is not None or or_resume):
        raise UserError("--run names a new run; --resume continues an old one.", "Use one of them.")
    if or_resume and run is None:
        raise UserError("--or-resume needs the name of the run to continue.", "Name it with --run.")
    summary: Summary | None
    try:
        if resume is not None:
            summary = python_api.resume(resume, overrides or (), console=console)
        elif run is not None and or_resume:
            summary = python_api.train_or_resume(recipe, overrides or (), run=run, console=console)
        else:
            summary = python_api.train(recipe, overrides or (), run=run, console=console)
    except ClusterDied as death:
        _resume_in_a_new_cluster(death, console)
    if summary is None:
        console.print(f"Run '{run}' is finished already; serve it with: strata serve --run {run}")
        return
    _print_summary(summary, console)
    if summary.export is None:
        raise typer.Exit(INTERRUPTED)


def _resume_in_a_new_cluster(death: ClusterDied, console: Console) -> NoReturn:
    """Replaces this process by one that resumes the run: Ray cannot be started again in a process that still waits for a dead
    cluster. Raises `death` after a few restarts, since a machine on which Ray keeps dying needs attention."""
    restarts = int(os.environ.get(RESTARTS, "0"))
    if death.run is None or restarts >= MOST_RESTARTS:
        raise death
    console.print(f"{death.cause} It is started again, and the run continues from its newest checkpoint.")
    sys.stdout.flush()
    main = "from strata.platform.cli import main; main()"
    os.environ[RESTARTS] = str(restarts + 1)
    os.execv(sys.executable, [sys.executable, "-c", main, "train", "--resume", death.run])


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN|DIR", help="A run's name, or a Hugging Face folder (with --onnx, --package).")
    ],
    to: Annotated[Path | None, typer.Option(help="A new folder. Default: the run's own export/.")] = None,
    onnx: Annotated[Path | None, typer.Option(help="Also write an ONNX model with a KV cache into this new folder.")] = None,
    package: Annotated[
        Path | None, typer.Option(help="Also compile an AOTInductor package, FILE.pt2, for programs without Strata.")
    ] = None,
    tensorrt: Annotated[Path | None, typer.Option(help="Also build a TensorRT engine from the ONNX model.")] = None,
    dtype: Annotated[str, typer.Option(help="Numeric type of these: float32, float16 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Device of the package: cpu or cuda.")] = "cpu",
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with prompts for the check. Default: tokens of the vocabulary.")
    ] = None,
    check: Annotated[int, typer.Option(help="Prompts whose greedy tokens are compared with transformers'.", min=1)] = 20,
    tokens: Annotated[int, typer.Option(help="Tokens that the check generates for each prompt.", min=1)] = 32,
) -> None:
    """Write a run's newest good checkpoint as a Hugging Face folder; of a picture model, as a diffusers folder.

    A Hugging Face folder, of a run or any other, can also be written as ONNX or as a package."""
    console = Console(highlight=False, soft_wrap=True)
    if not (onnx or package or tensorrt):
        console.print(f"exported to {_export_run(source, to, console)}")
        return
    from strata.training.deployment.request import Request
    from strata.training.deployment.requirements import require_possible

    request = Request(onnx, package, tensorrt, dtype, device, prompts, check, tokens)
    require_possible(request)
    folder = _export_folder(source, to, console)
    from strata.training.deployment.deploy import deploy

    try:
        deploy(folder, request, console)
    except KeyboardInterrupt:
        console.print("interrupted; nothing unfinished was written")
        raise typer.Exit(INTERRUPTED) from None


def _export_run(name: str, to: Path | None, console: Console) -> Path:
    found = runs.find(name)
    from strata.training.checkpoint.export import export_run

    return export_run(found, to, console.print)


def _export_folder(source: str, to: Path | None, console: Console) -> Path:
    """Hugging Face folder of a run, written first, or a folder that is one. A name with a slash in it is never a run's."""
    from strata.training.deployment.model_folder import require_exportable

    if runs.exists(source) or not Path(source).is_dir():
        if "/" in source:
            raise UserError(f"There is no folder {source}.", "Name a run, or a Hugging Face folder.")
        folder = _export_run(source, to, console)
        console.print(f"exported to {folder}")
    elif to is not None:
        raise UserError(f"{source} is a Hugging Face folder already; --to is for runs.", "Leave --to out.")
    else:
        folder = Path(source)
    require_exportable(folder)
    return folder


def _against_bigram(val_loss: float, bigram: float | None) -> str:
    if bigram is None:
        return ""
    verdict = f"{abs(bigram - val_loss):.3f} nats per token {'better' if val_loss < bigram else 'worse'} than the bigram"
    return f", bigram {bigram:.3f} ({verdict})"


def _print_summary(summary: "Summary", console: Console) -> None:
    if summary.val_loss is not None:
        verdict = _against_bigram(summary.val_loss, summary.bigram)
        perplexity = f" (perplexity {summary.perplexity:.4g})" if summary.perplexity is not None else ""
        console.print(f"step {summary.step}: validation loss {summary.val_loss:.3f}{perplexity}{verdict}")
    if summary.agreement is not None:
        console.print(f"greedy choice of the teacher on {summary.agreement:.1%} of held-out tokens")
    if summary.pictures and summary.pictures.verdict:
        console.print(summary.pictures.verdict)
    if summary.pictures and summary.pictures.grid:
        console.print(f"pictures: {summary.pictures.grid}")
    if summary.export is None:
        console.print(f"interrupted; continue with: strata train --resume {summary.run.name}")
    else:
        seconds = time.time() - psutil.Process().create_time()
        if summary.agreement is not None:
            console.print(f"tokens per step as a draft model: strata eval draft {summary.run.name}")
        console.print(f"exported to {summary.export} after {seconds:.0f} s; serve it with: strata serve --run {summary.run.name}")
