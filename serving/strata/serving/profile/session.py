"""An endpoint with the profiler on, under load: start, warm-up, profile, stop."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strata.platform import ports
from strata.platform.errors import UserError
from strata.platform.files import cache_dir
from strata.serving import access
from strata.serving.bench.clients import load
from strata.serving.bench.clients.load import Level, Record, Target
from strata.serving.bench.clients.workloads import Workload
from strata.serving.bench.contenders.subject import Subject
from strata.serving.engine.profiled import START, STOP
from strata.serving.profile import folder
from strata.serving.runtime import endpoint

HOST = "127.0.0.1"
LIMIT_S = 600.0  # for an engine to write its trace: seconds for each 100,000 operators
POLL_S = 0.1
WARM_UP_SEED = 1  # other prompts than those of the load


@dataclass(frozen=True)
class Load:
    workload: Workload
    level: Level
    seed: int
    clients: int


def profiler(target: Path) -> dict[str, object]:
    """vLLM's `profiler_config`."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(target),
        "torch_profiler_record_shapes": True,
        "torch_profiler_with_memory": True,
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }


def profile(subject: Subject, wanted: Load, target: Path, tell: Callable[[str], None]) -> list[Record]:
    """Sends the load to the endpoint while its engines are profiled, and writes the profile into `target`."""
    work = cache_dir() / "profile"
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work, prefix=".serve-") as temporary, ports.reserve(HOST) as held:
        traces = Path(temporary).resolve()
        engine = subject.section.engine | {"profiler_config": profiler(traces)}
        section = subject.section.model_copy(update={"host": HOST, "port": held.port, "engine": engine})
        tell("starting the endpoint")
        with endpoint.running(section, subject.folder, subject.model_id, tell) as up:
            connected = Target(HOST, section.port, subject.model_id, access.key_for(up.url))
            tell("warming up")
            load.run(connected, wanted.workload, wanted.level, wanted.clients, WARM_UP_SEED)
            request(traces, START)
            tell(f"profiling at {wanted.level.label}")
            outcome = load.run(connected, wanted.workload, wanted.level, wanted.clients, wanted.seed)
            clock_s = time.time() - time.perf_counter()
            tell("engines write their traces")
            request(traces, STOP)
            tell("stopping the endpoint")
        require_answers(outcome.records)
        folder.collect(traces, target, outcome.records, clock_s)
    return outcome.records


def request(traces: Path, what: str, limit_s: float = LIMIT_S) -> None:
    """Requests the start or the stop of the profile, and waits until every engine has confirmed it."""
    (traces / what).touch()
    deadline = time.monotonic() + limit_s
    while missing := [each.name for each in traces.iterdir() if each.is_dir() and not (each / what).exists()]:
        if time.monotonic() > deadline:
            cause = f"Engines {', '.join(sorted(missing))} did not {what} their profile within {limit_s:g} s."
            raise UserError(cause, "Profile fewer --requests; the disk may be full.")
        time.sleep(POLL_S)


def require_answers(records: list[Record]) -> None:
    if errors := [each.error for each in records if each.error]:
        raise UserError(f"{len(errors)} of {len(records)} requests failed: {errors[0]}", "Try the endpoint with 'strata serve'.")


def processes() -> int:
    return max(1, (os.cpu_count() or 1) // 2)
