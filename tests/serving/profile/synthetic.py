"""Traces in the format of vLLM's profiler, and logs of schedulers, written by hand. Times are in milliseconds."""

import json
from dataclasses import dataclass, field
from typing import Any

from strata.platform.profile import trace
from strata.serving.profile.analysis import phases, scheduler_log
from strata.serving.profile.analysis.summary import Engine

BASE_NS = 1_790_000_000_000_000_000
LOOP, STREAM = 11, 7  # thread and stream
CALL = 0.1  # of the scheduler
FACTS = {"rank": 0, "device": "cpu", "dtype": "float32", "max_sequences": 4, "step_tokens": 64, "kv_tokens": 1024, "threads": 1}


@dataclass
class Writer:
    role: str = "decode"
    events: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    _correlation: int = 0

    def range(self, name: str, begin: float, length: float) -> None:
        self._add("user_annotation", name, begin, length)

    def op(self, name: str, begin: float, length: float, *dims: list[int]) -> None:
        self._add("cpu_op", name, begin, length, **{"Input Dims": list(dims), "Input type": ["float"] * len(dims)})

    def kernel(self, name: str, launch: float, begin: float, length: float) -> None:
        self._correlation += 1
        self._add("cuda_runtime", "cudaLaunchKernel", launch, 0.01, correlation=self._correlation)
        self._add("kernel", name, begin, length, thread=STREAM, correlation=self._correlation)

    def arrival(self, name: str, at: float, prompt: int = 8) -> None:
        self._log(at, None, arrived=name, prompt=prompt)

    def schedule(self, at: float, tokens: dict[str, int], length: float = 1.0, **facts: Any) -> None:
        known = {"waiting": 0, "remote": 0, "preempted": [], "kv": 0.1, "delayed": 0.0} | facts
        self._log(at, at + length, scheduled=tokens, **known)

    def update(self, at: float, *finished: str, length: float = 1.0) -> None:
        self._log(at, at + length, finished=list(finished))

    def step(self, at: float, length: float, tokens: dict[str, int], finished: tuple[str, ...] = (), work: float = 1.0) -> None:
        """A step whose operators take a share `work` of it. The scheduler takes 0.1 ms before it, and as long after it."""
        self.schedule(at - CALL, tokens, CALL)
        prompts = {name: count for name, count in tokens.items() if count > 1}
        streams = len(tokens) - len(prompts)
        name = f"execute_context_{len(prompts)}({sum(prompts.values())})_generation_{streams}({streams})"
        self.range(name, at, length)
        self.range("gpu_model_runner: forward", at, length)
        self.op("_C::onednn_mm", at, length * work, [len(tokens), 32], [len(tokens), 16])
        self.update(at + length, *finished, length=CALL)

    def engine(self, end: float, client: list[tuple[float, float]], name: str | None = None) -> Engine:
        document = {"traceEvents": self.events}
        facts = FACTS | {"role": self.role}
        log = scheduler_log.read(map(json.dumps, self.lines), BASE_NS)
        parsed = trace.parse(document, facts, phases.is_step)
        seen = tuple((begin / 1e3, last / 1e3) for begin, last in client)
        return Engine(name or f"{self.role}-0", facts, parsed, log, (0.0, end / 1e3), seen)

    def _add(self, kind: str, name: str, begin: float, length: float, thread: int = LOOP, **args: Any) -> None:
        where = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": thread}
        self.events.append(where | {"ts": begin * 1e3, "dur": length * 1e3, "args": args})

    def _log(self, begin: float, end: float | None, **entry: Any) -> None:
        times = {"begin": BASE_NS + round(begin * 1e6)} | ({} if end is None else {"end": BASE_NS + round(end * 1e6)})
        self.lines.append(entry | times)
