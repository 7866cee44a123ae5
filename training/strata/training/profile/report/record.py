"""JSON of a profile: header, findings, time by cause for each rank, work by class, exchanges and plan."""

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from strata.platform import benchmark_record
from strata.platform.profile.finding import Finding
from strata.training.model.flops import flops_per_token, mfu
from strata.training.profile.analysis.expected import Machine
from strata.training.profile.analysis.summary import RankSummary, Summary


def as_json(summary: Summary, machine: Machine, found: list[Finding]) -> dict[str, Any]:
    recipe = summary.recipe
    return benchmark_record.header("profile") | {
        "recipe": recipe.model_dump(mode="json"),
        "step_s": summary.step,
        "mfu": utilization(summary, machine),
        "peak_flops": machine.peak,
        "findings": [asdict(each) for each in found],
        "exposed_communication_s": summary.transfers,
        "pipeline_bubble_s": summary.bubble,
        "planned_s": {name: {"planned": pair[0], "measured": pair[1]} for name, pair in machine.planned.items()},
        "ranks": [_rank(each) for each in summary.ranks],
    }


def utilization(summary: Summary, machine: Machine) -> float | None:
    recipe = summary.recipe
    rate = recipe.train.batch * recipe.model.context / summary.step
    return mfu(rate, flops_per_token(recipe.model, recipe.train.lora is not None), recipe.parallel.workers, machine.peak)


def _rank(rank: RankSummary) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "stage": rank.stage,
        "device": rank.trace.facts["device"],
        "steps": rank.trace.facts["steps"],
        "measured_step_s": rank.wall,
        "processor_available": rank.available,
        "seconds": rank.seconds,
        "waiting_s": rank.waiting,
        "flops": rank.flops,
        "communication_s": rank.communication,
        "peak_memory_bytes": rank.memory,
        "work": work_by_class(rank),
    }


def work_by_class(rank: RankSummary) -> list[dict[str, Any]]:
    """Work per step by class, phase and shape, most first."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for work in rank.works:
        entry = sums[(work.kind, work.phase, work.shape)]
        entry[0] += work.seconds
        entry[1] += work.flops
        entry[2] += 1
    steps = len(rank.steps)
    found = [
        {"class": kind, "phase": phase, "shape": shape, "s": seconds / steps, "flops": flops / steps, "calls": calls / steps}
        for (kind, phase, shape), (seconds, flops, calls) in sums.items()
    ]
    return sorted(found, key=lambda each: -float(each["s"]))
