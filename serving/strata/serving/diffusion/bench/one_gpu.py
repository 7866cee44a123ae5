"""Full-size models on one GPU, beside diffusers, and attention in their shapes, beside cuDNN and FlashAttention.

Everything is compiled first, in parallel processes, which fill the compilers' caches on disk. A contender that fails is recorded
with its error, and the others go on.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import torch
from torch import nn

from strata.serving.diffusion.bench.contenders import COMPILED, OURS, Run, comparable, contender
from strata.serving.diffusion.bench.models import PictureModel

WARM_UP_STEPS = 2


@dataclass
class Result:
    """Times of one contender. `first_s` is the first picture of a few steps, compilation included; `error` is the relative
    difference of its latents from those of the first contender, after a few steps."""

    seconds: list[float] = field(default_factory=list)  # per picture
    first_s: float | None = None
    error: float | None = None
    trouble: str | None = None


@dataclass
class PictureRow:
    """A model with its contenders. `trouble`: nothing was measured."""

    model: str
    size: int
    steps: int
    passes: int  # of the model per step
    parameters: int = 0
    contenders: dict[str, Result] = field(default_factory=dict)
    trouble: str | None = None


class Clock:
    """Time limit of the benchmark."""

    def __init__(self, limit_s: float) -> None:
        self.end = time.monotonic() + limit_s

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def measure_model(
    model: PictureModel,
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    clock: Clock,
    save: Callable[[PictureRow], None],
) -> PictureRow:
    """Pictures of these contenders in alternating rounds, while there is time. `save` is called after every figure."""
    row = PictureRow(model.name, model.size, model.steps, 2 if model.guided else 1)
    try:
        transformer = model.build(device, dtype)
        row.parameters = sum(parameter.numel() for parameter in transformer.parameters())
    except Exception as error:
        row.trouble = first_line(error)
        save(row)
        return row
    runs = _warmed_up(model, names, transformer, device, clock, row, save)
    for _ in range(rounds):
        for name, run in list(runs.items()):
            result = row.contenders[name]
            if clock.left < 1.5 * max(result.seconds, default=0.0):
                continue
            try:
                result.seconds.append(timed(partial(run, model.steps, 1), device))
            except Exception as error:
                result.trouble = first_line(error)
                del runs[name]
            save(row)
    for result in row.contenders.values():
        if not result.seconds and result.trouble is None:
            result.trouble = "time limit"
    save(row)
    del runs, transformer
    free(device)
    return row


def _warmed_up(
    model: PictureModel,
    names: Sequence[str],
    transformer: nn.Module,
    device: torch.device,
    clock: Clock,
    row: PictureRow,
    save: Callable[[PictureRow], None],
) -> dict[str, Run]:
    """The contenders that run, after a first picture each, which is compared with that of the first."""
    torch._dynamo.reset()
    runs: dict[str, Run] = {}
    truth: torch.Tensor | None = None
    for name in names:
        result = row.contenders.setdefault(name, Result())
        if clock.left < 0:
            result.trouble = "time limit"
            continue
        try:
            start = time.perf_counter()
            run = contender(name, model, transformer)
            output = comparable(model, run(WARM_UP_STEPS, 1))
            synchronize(device)
            result.first_s = time.perf_counter() - start
            if model.family.name != "dit":  # whose pipeline takes no noise
                truth = output if truth is None else truth
                result.error = float((output - truth).norm() / truth.norm())
            runs[name] = run
        except Exception as error:
            result.trouble = first_line(error)
            free(device)
        save(row)
    return runs


def timed(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def compile_ahead(models: Sequence[PictureModel], device: torch.device, dtype: torch.dtype, limit_s: float) -> str | None:
    """Compile the blocks of all contenders in parallel processes. Errors are ignored here: the measurement reports them. Returns
    a remark if something was not compiled in time."""
    jobs = [(model.shallow(), name) for model in models for name in (COMPILED, OURS)]
    cores = os.cpu_count() or 1
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # of each process, which would start one thread per core
    pool = ProcessPoolExecutor(max(1, min(len(jobs), cores - 2)), mp_context=get_context("spawn"))
    try:
        done = wait([pool.submit(_first_picture, model, name, device, dtype) for model, name in jobs], timeout=limit_s)
        failed = sum(job.exception() is not None for job in done.done)
        late = len(done.not_done)
        return f"compiled ahead: {len(jobs) - late - failed} of {len(jobs)}" if late or failed else None
    finally:
        del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
        for process in list((pool._processes or {}).values()):
            process.kill()  # no other process may use the GPU during timing
        pool.shutdown(wait=False, cancel_futures=True)


def _first_picture(model: PictureModel, name: str, device: torch.device, dtype: torch.dtype) -> None:
    contender(name, model, model.build(device, dtype))(1, 1)
    synchronize(device)


def attention_rows(device: torch.device, clock: Clock) -> Iterator[dict[str, object]]:
    """Results of the kernel benchmark's cases in the shapes of diffusion transformers, as its JSON."""
    from strata.kernels.bench import ceilings
    from strata.kernels.bench.cases.flash_attention import picture_cases
    from strata.kernels.bench.harness import Settings, measure
    from strata.kernels.bench.report import row_as_json

    settings = Settings()
    top = ceilings.measure(device, settings.budget)
    for case in picture_cases():
        if clock.left < 0:
            return
        yield row_as_json(measure(case, device, settings, lambda _: None), top)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"[:300]
