"""Traces of a GPU in the format of torch's profiler, written by hand: CI has none."""

from dataclasses import dataclass, field
from typing import Any

from strata.platform.profile.trace import PREFIX, Trace, parse

LOOP, AUTOGRAD = 1, 2  # threads
COMPUTE, NCCL = 7, 20  # streams
STEP_US = 100_000.0
BF16 = "c10::BFloat16"


@dataclass
class Writer:
    """Times are in microseconds from the beginning of a step of 100 ms."""

    events: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    _correlation: int = 0

    @property
    def _base(self) -> float:
        return (len(self.steps) - 1) * STEP_US

    def step(self, number: int) -> None:
        self.steps.append(number)
        self.range(f"step {number}", 0, STEP_US)

    def range(self, name: str, begin: float, length: float) -> None:
        self._add("user_annotation", PREFIX + name, begin, length, LOOP)

    def op(self, name: str, begin: float, length: float, thread: int = LOOP, **args: Any) -> None:
        self._add("cpu_op", name, begin, length, thread, **args)

    def runtime(self, name: str, begin: float, length: float, thread: int = LOOP) -> None:
        self._add("cuda_runtime", name, begin, length, thread)

    def kernel(self, name: str, launch: float, begin: float, length: float, thread: int = LOOP, stream: int = COMPUTE) -> None:
        self._correlation += 1
        self._add("cuda_runtime", "cudaLaunchKernel", launch, 3, thread, correlation=self._correlation)
        self._add("kernel", name, begin, length, stream, correlation=self._correlation)

    def trace(self, rank: int = 0, device: str = "NVIDIA H200") -> Trace:
        facts = {"rank": rank, "steps": self.steps, "device": device, "threads": 1, "delays": {}}
        return parse({"traceEvents": self.events}, facts)

    def _add(self, kind: str, name: str, begin: float, length: float, thread: int, **args: Any) -> None:
        where = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": thread}
        self.events.append(where | {"ts": self._base + begin, "dur": length, "args": args})


def product(m: int, k: int, n: int) -> dict[str, Any]:
    return {"Input Dims": [[m, k], [k, n]], "Input type": [BF16, BF16]}
