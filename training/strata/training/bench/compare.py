"""Training benchmark across contenders. Rounds alternate between them, so other load on the machine affects all of them."""

import itertools
import json
import signal
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.platform.recipe import Recipe
from strata.training.bench import launch, report
from strata.training.bench.contest import LIGER, OURS, Contender, Job, Round, accumulation, measure, on_kernels_of, shortened
from strata.training.bench.ours import has_ray
from strata.training.data import shards
from strata.training.data.corpus import open_corpus
from strata.training.metrics.records import Record
from strata.training.model.flops import peak_flops

CONTENDERS: tuple[Contender, ...] = ("bare", *LIGER, "ours")


@dataclass(frozen=True)
class Settings:
    """Options of `strata bench train`. `rounds` None: five on CPUs, which often carry other load, and one on GPUs. `only` empty:
    all contenders. `kernels`: Strata also with torch's kernels and with Liger's."""

    steps: int = 60
    warmup: int = 20
    rounds: int | None = None
    only: tuple[Contender, ...] = ()
    ray: bool = True
    kernels: bool = False


def bench(recipe: Recipe, settings: Settings, path: Path | None) -> report.Outcome:
    """Runs the benchmark on a corpus, prints a table and writes JSON to `path`, by default in the cache folder."""
    require_measured_steps(settings)
    console = Console(highlight=False, soft_wrap=True)
    with console.status("reading the corpus"):
        tokens = shards.prepare(open_corpus(recipe.data), recipe.model.vocab, recipe.data.holdout)
    return contest_on(tokens, (), recipe, settings, path or cache_dir() / "bench" / "train.json", console)


def require_measured_steps(settings: Settings) -> None:
    if settings.warmup >= settings.steps:
        raise UserError(
            f"--warmup {settings.warmup} leaves no step of --steps {settings.steps} to measure.",
            "Raise --steps or lower --warmup.",
        )


def contest_on(
    tokens: Path, mix: tuple[float, ...], recipe: Recipe, settings: Settings, target: Path, console: Console
) -> report.Outcome:
    """Runs the benchmark on prepared tokens; `mix` has the weights of the sets in them, for fine-tuning."""
    recipe = shortened(recipe, settings.steps)
    accumulation(recipe)  # raises for a batch that the peers cannot shard
    peak = _peak(recipe)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcome = _compete(recipe, settings, tokens, mix, peak, console)
    console.print(report.table(outcome))
    write_atomic(target, json.dumps(report.as_json(outcome), indent=2))
    console.print(f"written to {target}" + (": the part that was measured, marked partial" if outcome.partial else ""))
    if outcome.partial:
        raise typer.Exit(130)
    if "ours" in outcome.left_out:
        raise UserError(f"Strata's own training failed: {outcome.left_out['ours']}", "Try the recipe with 'strata train'.")
    return outcome


def obstacle(contender: Contender, recipe: Recipe) -> str | None:
    """Reason why a contender cannot run here, None if it can."""
    if contender in ("bare", *LIGER) and recipe.train.lora and not find_spec("peft"):
        return "peft is not installed"
    if contender not in (*LIGER, "ours_liger"):
        return None
    if recipe.parallel.device != "gpu":
        return "its kernels need a GPU"
    if recipe.model.moe and contender in LIGER:
        return "its Llama has no mixture of experts"
    return None if find_spec("liger_kernel") else "liger-kernel is not installed"


def _compete(
    recipe: Recipe, settings: Settings, tokens: Path, mix: tuple[float, ...], peak: float | None, console: Console
) -> report.Outcome:
    """Runs all rounds. A contender that fails is excluded from later rounds and reported with the reason. Ctrl-C returns the
    rounds finished so far."""
    contenders = (*CONTENDERS, *OURS[1:]) if settings.kernels else CONTENDERS
    chosen = settings.only or contenders
    left_out = {contender: reason for contender in chosen if (reason := obstacle(contender, recipe))}
    rounds: dict[Contender, list[Round]] = {contender: [] for contender in chosen if contender not in left_out}
    with_ray = settings.ray and has_ray()
    count = settings.rounds or (5 if recipe.parallel.device == "cpu" else 1)
    work = cache_dir() / "bench"  # on storage that all workers share, like runs
    work.mkdir(parents=True, exist_ok=True)
    for number, contender in itertools.product(range(count), list(rounds)):
        if contender in left_out:
            continue
        name = f"round {number + 1} of {count}: {report.name_of(contender, with_ray, recipe)}"
        try:
            with tempfile.TemporaryDirectory(dir=work, prefix=f".{contender}-") as folder:
                own = on_kernels_of(contender, recipe)
                job = Job(contender=contender, recipe=own, tokens=tokens, folder=Path(folder), mix=mix)
                history = _run_round(job, with_ray, work, name, console)
        except launch.Failed as failure:
            del rounds[contender]
            left_out[contender] = str(failure)
            continue
        except KeyboardInterrupt:
            measured = {contender: done for contender, done in rounds.items() if done}
            return report.Outcome(recipe, settings.warmup, with_ray, measured, left_out, peak, partial=True)
        rounds[contender].append(measure(history, recipe, settings.warmup))
        console.print(f"{name} {rounds[contender][-1].tokens_per_s:,.0f} tokens/s")
    return report.Outcome(recipe, settings.warmup, with_ray, rounds, left_out, peak)


def _run_round(job: Job, with_ray: bool, logs: Path, name: str, console: Console) -> list[Record]:
    steps = job.recipe.train.steps
    with console.status(f"{name}, starting") as status:
        return launch.run(job, with_ray, logs, lambda step: status.update(f"{name}, step {step} of {steps}"))


def _peak(recipe: Recipe) -> float | None:
    """Peak FLOP/s of one worker, measured once for all contenders: separate measurements would differ."""
    import torch

    if recipe.parallel.device == "gpu" and torch.cuda.device_count() < recipe.parallel.workers:
        raise UserError(
            f"parallel.workers={recipe.parallel.workers} needs as many GPUs; this machine has {torch.cuda.device_count()}.",
            "Set parallel.device=cpu, or lower parallel.workers.",
        )
    torch.set_float32_matmul_precision(recipe.train.matmul)
    return peak_flops(recipe.parallel.device, recipe.train.precision, recipe.parallel.cpus_per_worker)
