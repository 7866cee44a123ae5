"""One case at a time: everybody's result is compared with the reference first, and only who is right is timed, in turns."""

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
from strata.kernels.bench.clock import milliseconds


@dataclass(frozen=True)
class Settings:
    rounds: int = 3
    budget: float = 25.0  # milliseconds of a contender in a round


@dataclass(frozen=True)
class Result:
    """`error` is the largest relative norm over outputs; `times` are medians in milliseconds, one a round; `extra` is bytes taken
    beyond inputs and outputs. `trouble` says why there are no times."""

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
    trouble: str | None = None  # with the inputs or the reference: then nobody ran

    @property
    def ours(self) -> Result:
        return self.results.get(OURS, Result(trouble=self.trouble))

    @property
    def failed(self) -> bool:
        """Ours did not run, gave something else than the reference, or took more memory than it may."""
        limit = self.case.memory_limit
        return self.ours.trouble is not None or (limit is not None and (self.ours.extra or 0) > limit)

    def peers(self) -> dict[str, float]:
        """Milliseconds of those that ran."""
        return {name: one.ms for name, one in self.results.items() if name != OURS and one.ms is not None}

    def ratio(self, *peers: str) -> float | None:
        """Our speed over that of the quickest of them."""
        times = [time for name, time in self.peers().items() if name in peers]
        return min(times) / self.ours.ms if times and self.ours.ms else None

    def reached(self, bar: Bar, ceilings: Ceilings) -> float | None:
        """What the bar measures; None where ours or the peer did not run."""
        if self.ours.ms is None:
            return None
        seconds = self.ours.ms / 1e3
        if bar.of == "copy":
            return self.bytes / seconds / ceilings.copy
        if bar.of == "matmul":
            return self.flops / seconds / ceilings.matmul
        return self.flops / seconds / 1e12 if bar.of == "TFLOP/s" else self.ratio(bar.of)


@dataclass
class _Standing:
    run: Callable[[], Any]
    error: float
    extra: int | None
    times: list[float] = field(default_factory=list)


def measure(case: Case, device: torch.device, settings: Settings, say: Callable[[str], None]) -> Row:
    """Who raises is out, with what it said; the others go on."""
    say("inputs and reference")
    torch._dynamo.reset()  # a case is compiled for its own shapes, not for all that came before it
    try:
        contest = case.build(device)
        truth = _tensors(contest.reference())
    except Exception as error:
        _tidy(device)
        return Row(case, {}, trouble=_told(error))
    results: dict[str, Result] = {}
    standing: dict[str, _Standing] = {}
    for name, contender in contest.contenders.items():
        say(f"checking {name}")
        if isinstance(contender, Missing):
            results[name] = Result(trouble=contender.reason)
            continue
        outcome = _check(contender, truth, contest, device)
        results[name] = outcome
        if outcome.trouble is None:
            assert outcome.error is not None
            standing[name] = _Standing(contender, outcome.error, outcome.extra)
    del truth
    for number in range(settings.rounds):
        for name, one in list(standing.items()):
            say(f"round {number + 1}: {name}")
            try:
                one.times.append(milliseconds(one.run, device, settings.budget))
            except Exception as error:
                results[name] = Result(one.error, trouble=_told(error))
                del standing[name]
    results |= {name: Result(one.error, tuple(one.times), one.extra) for name, one in standing.items()}
    row = Row(case, results, contest.bytes, contest.flops, contest.tolerance)
    del contest, standing
    _tidy(device)
    return row


def _check(contender: Callable[[], Any], truth: tuple[Tensor, ...], contest: Contest, device: torch.device) -> Result:
    try:
        error = relative_error(_tensors(contender()), truth)
        extra = _extra_memory(contender) if device.type == "cuda" else None
    except Exception as raised:
        _tidy(device)
        return Result(trouble=_told(raised))
    if not error <= contest.tolerance:  # so that not-a-number is wrong as well
        return Result(error, trouble=f"wrong: off by {error:.1e} where {contest.tolerance:.0e} is allowed", wrong=True)
    return Result(error, extra=extra)


def relative_error(outputs: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    """The norm of the difference over the norm of the truth, the largest of all outputs."""
    if [one.shape for one in outputs] != [one.shape for one in truth]:
        raise ValueError(f"shapes are {[(*one.shape,) for one in outputs]}, not {[(*one.shape,) for one in truth]}")
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
    """At its peak, beyond what was there before and what it hands back. It has run before: workspaces that stay are not its."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = _tensors(run())
    torch.cuda.synchronize()
    handed = sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in outputs}.values())
    return max(torch.cuda.max_memory_allocated() - before - handed, 0)


def _tensors(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'without a word'}"


def _tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
