"""Measures one case: checks every contender against the reference, then times the correct ones in alternating rounds."""

import gc
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strata.kernels.bench.case import OURS, Bar, Case, Contest, Missing
from strata.kernels.bench.ceilings import Ceilings
from strata.kernels.bench.clock import FEWEST_RUNS, milliseconds


@dataclass(frozen=True)
class Settings:
    rounds: int = 3
    budget: float = 25.0  # milliseconds per contender and round
    fewest: int = FEWEST_RUNS  # runs per contender and round, also of those that take longer than the budget


@dataclass(frozen=True)
class Result:
    """`error` is the largest relative norm over outputs; `times` are medians in milliseconds, one per round; `extra` is bytes
    allocated beyond inputs and outputs. `trouble` is the reason if there are no times."""

    error: float | None = None
    times: tuple[float, ...] = ()
    extra: int | None = None
    trouble: str | None = None
    wrong: bool = False

    @property
    def ms(self) -> float | None:
        return statistics.median(self.times) if self.times else None


@dataclass(frozen=True)
class Row:
    case: Case
    results: dict[str, Result]
    bytes: int = 0
    flops: int = 0
    tolerance: float = 0.0
    trouble: str | None = None  # error in the inputs or the reference: no contender ran

    @property
    def ours(self) -> Result:
        return self.results.get(OURS, Result(trouble=self.trouble))

    @property
    def failed(self) -> bool:
        """Strata's kernel did not run, differs from the reference, or exceeds its memory limit."""
        limit = self.case.memory_limit
        return self.ours.trouble is not None or (limit is not None and (self.ours.extra or 0) > limit)

    def peers(self) -> dict[str, float]:
        """Milliseconds of the peers that ran."""
        return {name: one.ms for name, one in self.results.items() if name != OURS and one.ms is not None}

    def ratio(self, *peers: str) -> float | None:
        """Strata's speed relative to the fastest of these peers."""
        times = [time for name, time in self.peers().items() if name in peers]
        return min(times) / self.ours.ms if times and self.ours.ms else None

    def reached(self, bar: Bar, ceilings: Ceilings) -> float | None:
        """The measured value of a target; None if Strata's kernel or the peer did not run."""
        if self.ours.ms is None:
            return None
        seconds = self.ours.ms / 1e3
        if bar.of == "copy":
            return self.bytes / seconds / ceilings.copy
        if bar.of == "matmul":
            return self.flops / seconds / ceilings.matmul
        return self.flops / seconds / 1e12 if bar.of == "TFLOP/s" else self.ratio(bar.of)


@dataclass
class _Timing:
    run: Callable[[], Any]
    error: float
    extra: int | None
    times: list[float] = field(default_factory=list)


def measure(case: Case, device: torch.device, settings: Settings, show: Callable[[str], None]) -> Row:
    """Measures a case. A contender that raises is excluded, with its error; the others continue."""
    show("inputs and reference")
    torch._dynamo.reset()  # compile each case for its own shapes, not for dynamic shapes after several cases
    try:
        contest = case.build(device)
        truth = _tensors(contest.reference())
    except Exception as error:
        _free_memory(device)
        return Row(case, {}, trouble=_first_line(error))
    results: dict[str, Result] = {}
    timings: dict[str, _Timing] = {}
    for name, contender in contest.contenders.items():
        show(f"checking {name}")
        if isinstance(contender, Missing):
            results[name] = Result(trouble=contender.reason)
            continue
        outcome = _check(contender, truth, contest, device)
        results[name] = outcome
        if outcome.trouble is None:
            assert outcome.error is not None
            timings[name] = _Timing(contender, outcome.error, outcome.extra)
    del truth
    for number in range(settings.rounds):
        for name, one in list(timings.items()):
            show(f"round {number + 1}: {name}")
            try:
                one.times.append(milliseconds(one.run, device, settings.budget, settings.fewest))
            except Exception as error:
                results[name] = Result(one.error, trouble=_first_line(error))
                del timings[name]
    results |= {name: Result(one.error, tuple(one.times), one.extra) for name, one in timings.items()}
    row = Row(case, results, contest.bytes, contest.flops, contest.tolerance)
    del contest, timings
    _free_memory(device)
    return row


def _check(contender: Callable[[], Any], truth: tuple[Tensor, ...], contest: Contest, device: torch.device) -> Result:
    try:
        error = relative_error(_tensors(contender()), truth)
        extra = _extra_memory(contender) if device.type == "cuda" else None
    except Exception as raised:
        _free_memory(device)
        return Result(trouble=_first_line(raised))
    if not error <= contest.tolerance:  # also true for NaN
        return Result(error, trouble=f"wrong: error {error:.1e}, tolerance {contest.tolerance:.0e}", wrong=True)
    return Result(error, extra=extra)


def relative_error(outputs: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    """The norm of the difference over the norm of the reference; the largest over all outputs."""
    if [one.shape for one in outputs] != [one.shape for one in truth]:
        raise ValueError(f"expected shapes {[(*one.shape,) for one in truth]}, got {[(*one.shape,) for one in outputs]}")
    return max(_relative(output, expected) for output, expected in zip(outputs, truth, strict=True))


def _relative(output: Tensor, expected: Tensor) -> float:
    wide = torch.promote_types(expected.dtype, torch.float32)
    expected = expected.detach().to(wide)
    off = torch.linalg.vector_norm(output.detach().to(wide) - expected, dtype=torch.float64).item()
    size = torch.linalg.vector_norm(expected, dtype=torch.float64).item()
    if math.isnan(off) or math.isnan(size):
        return math.nan
    return float(off / size if size else off)


def _extra_memory(run: Callable[[], Any]) -> int:
    """Peak memory beyond what was allocated before and the outputs. The first run is not measured: it allocates workspaces."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = _tensors(run())
    torch.cuda.synchronize()
    returned = sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in outputs}.values())
    return max(torch.cuda.max_memory_allocated() - before - returned, 0)


def _tensors(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
