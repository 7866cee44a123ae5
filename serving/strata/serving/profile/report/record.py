"""JSON of a profile of an endpoint: header, findings, load, and for each engine time by cause, phases, operators, requests."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from strata.platform import benchmark_record
from strata.platform.profile.finding import Finding
from strata.serving.bench.clients import measure
from strata.serving.profile.analysis.summary import EngineSummary, Summary
from strata.serving.profile.machine import Machine
from strata.serving.profile.request_lanes import spans


def as_json(summary: Summary, machine: Machine, found: Sequence[Finding], load: measure.Summary) -> dict[str, Any]:
    latencies = {key: value for key, value in asdict(load).items() if not key.startswith("goodput")}
    return benchmark_record.header("profile serve") | {
        "window_s": summary.window,
        "findings": [asdict(each) for each in found],
        "load_while_profiled": latencies,
        "peak_flops": machine.peak,
        "engines": [_engine(each) for each in summary.engines],
    }


def _engine(engine: EngineSummary) -> dict[str, Any]:
    begin, end = engine.engine.window
    memory = [size for at, size in engine.engine.trace.memory if begin <= at < end]
    return {
        "engine": engine.name,
        **engine.engine.facts,
        "busy_share": engine.busy / engine.window,
        "processor_available": engine.available,
        "seconds": engine.seconds,
        "phases": {name: asdict(phase) for name, phase in engine.phases.items()},
        "steps": engine.steps,
        "preemptions": engine.preemptions,
        "queued_share": engine.queued,
        "most_kv_cache": max((step.kv for step in engine.engine.log.steps if begin <= step.begin < end), default=0.0),
        "peak_memory_bytes": max(memory, default=0),
        "work": work_by_class(engine),
        "requests": [
            {"request": each.name, "prompt": each.prompt, "steps": len(each.steps)}
            | {f"{name}_s": last - first for name, first, last in spans(each)}
            for each in engine.requests
        ],
    }


def work_by_class(engine: EngineSummary) -> list[dict[str, Any]]:
    """Work by class, phase, operator and shape, most first."""
    sums: dict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for work in engine.works:
        entry = sums[(work.kind, work.phase, work.name, work.shape)]
        entry[0] += work.seconds
        entry[1] += work.flops
        entry[2] += 1
    found = [
        {"class": kind, "phase": phase, "name": name, "shape": shape, "s": seconds, "flops": flops, "calls": calls}
        for (kind, phase, name, shape), (seconds, flops, calls) in sums.items()
    ]
    return sorted(found, key=lambda each: -float(each["s"]))
