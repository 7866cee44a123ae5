"""Failure model of a training run: mean time between failures, checkpoint interval and goodput.

Failures are Poisson with mean distance `every`. A run saves a checkpoint every `interval` and stalls for `stall` at each save. A
checkpoint is durable `lag` after the stall. A failure costs the time until the run is `back`, and all work since the last
durable checkpoint. The mean over the cycles from one restart to the next failure is the exact goodput (GOODPUT below; without
lag it is Daly's formula, FGCS 2006).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strata.planner import ranges
from strata.planner.catalogue.fleets import FLEETS, Rates
from strata.planner.serving.queueing import erlang_b, poisson_at_most, smallest
from strata.planner.units import show
from strata.planner.worksheet import Worksheet
from strata.platform.errors import UserError

Mode = Literal["blocking", "asynchronous", "peer-memory"]
MODES: tuple[Mode, ...] = ("blocking", "asynchronous", "peer-memory")

HOUR = 3600.0
MOST_PER_FAILURE = 50  # times the mean time between failures; above, goodput is below e^-50
MOST_SPARES = 10**7  # the largest GPU count of a run
GOODPUT = "interval_s * exp(-(lag_s + back_s) / every_s) / (every_s * (exp((interval_s + stall_s) / every_s) - 1))"


@dataclass(frozen=True)
class Recovery:
    """Detection, restart and repair times of a cluster. Defaults are published figures where available."""

    # MegaScale, arXiv 2402.15627: detection and diagnosis take less than 10 minutes on average.
    detect_s: float = 600.0
    # MegaScale: communicators over 10,000 GPUs in under 30 s; the same again for processes and the slow first step.
    start_s: float = 60.0
    # Share of a save that stalls training while the state is copied: 148.8 s became 6.3 s for 7B with PyTorch's asynchronous
    # distributed checkpoint (PyTorch blog, 2024).
    stall_share: float = 0.05
    # Rate of a node into its neighbour's host memory, B/s: one of eight 400 Gb/s cards.
    peer_bandwidth: float = 50e9
    # Share of failures that lose a node and the neighbour with its copy: an assumption. Gemini (SOSP 2023) recovers 93% from
    # memory even where two machines of sixteen always fail together, and more in larger clusters.
    together: float = 0.01
    repair_s: float = 24 * HOUR  # an assumption: a node is back the next day
    gpus_per_node: int = 8
    spares: int | None = None  # nodes; None: as many as `confidence` requires
    confidence: float = 0.99  # probability that a spare is free when a node fails


USUAL = Recovery()


@dataclass(frozen=True)
class Spot:
    """Spot instances, which the provider may preempt. Notice: 120 s on AWS, 30 s on Google Cloud and Azure."""

    preemptions_per_hour: float  # of one node
    price_ratio: float  # relative to on demand
    notice_s: float = 120.0
    wait_s: float = 300.0  # until a replacement node starts


@dataclass(frozen=True)
class Saving:
    """One checkpoint mode at its best interval. `goodput` covers the time in which enough nodes are up."""

    mode: Mode
    interval_s: float
    interval_steps: int
    goodput: float
    worksheet: Worksheet


@dataclass(frozen=True)
class FailurePlan:
    """`goodput` is that of the best mode times `available`, the share of time in which failed nodes do not exceed the spares."""

    mtbf_s: float
    save_s: float
    savings: dict[Mode, Saving]
    spares: int
    available: float
    goodput: float
    goodput_per_paid_gpu: float
    dollars_per_useful_hour: float
    spot_dollars_per_useful_hour: float | None
    worksheet: Worksheet

    @property
    def best(self) -> Saving:
        return max(self.savings.values(), key=lambda saving: saving.goodput)


def daly(save_s: float, mtbf_s: float) -> float:
    """Daly's higher-order interval (2006)."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def exact(save_s: float, mtbf_s: float) -> float:
    """Interval that maximizes GOODPUT: x = interval / mtbf solves (1 - x) e^x = e^(-save/mtbf), so x = 1 + W(-e^(-1-save/mtbf))
    with Lambert's W. Bisection finds x without losing digits near W's branch point, where short saves lie."""
    low, high = 0.0, 1.0
    for _ in range(100):
        x = (low + high) / 2
        low, high = (x, high) if x < 1 and x + math.log1p(-x) + save_s / mtbf_s > 0 else (low, x)
    return high * mtbf_s


def plan_failures(
    gpus: int,
    state_bytes: float,
    step_seconds: float,
    storage_bandwidth: float,
    *,
    worksheet: Worksheet,
    rates: Rates = FLEETS["llama3"],
    recovery: Recovery = USUAL,
    spot: Spot | None = None,
    dollars_per_gpu_hour: float = 0.0,
) -> FailurePlan:
    """Plan checkpoints and spares. `storage_bandwidth` is the total rate for all GPUs, equal for saving and loading."""
    top = _describe(gpus, state_bytes, step_seconds, storage_bandwidth, rates, recovery, worksheet)
    savings = {mode: _save(mode, top.part(mode)) for mode in MODES}
    best = max(savings.values(), key=lambda saving: saving.goodput)
    top.given("best_goodput", best.goodput, "", f"of the best checkpoint mode, {best.mode}")
    spares = _write_spares(recovery, top)
    top.work_out("goodput", "best_goodput * available", "", "useful time over wall time")
    top.work_out("goodput_per_paid_gpu", "goodput * nodes / (nodes + spares)", "", "spares are paid for too")
    top.given("dollars_per_gpu_hour", dollars_per_gpu_hour, "$")
    formula = "(nodes + spares) * gpus_per_node * dollars_per_gpu_hour / goodput"
    dollars = top.work_out("dollars_per_useful_hour", formula, "$", "of the whole run, on demand")
    return FailurePlan(
        mtbf_s=top["mtbf_s"],
        save_s=top["save_s"],
        savings=savings,
        spares=spares,
        available=top["available"],
        goodput=top["goodput"],
        goodput_per_paid_gpu=top["goodput_per_paid_gpu"],
        dollars_per_useful_hour=dollars,
        spot_dollars_per_useful_hour=_write_spot(spot, top) if spot else None,
        worksheet=top,
    )


def goodput_curve(plan: FailurePlan, intervals: Sequence[float]) -> dict[Mode, list[float]]:
    """Goodput by checkpoint interval, while enough nodes are up. The second level of peer memory stays at its best interval."""
    return {mode: [_goodput(interval, saving.worksheet) for interval in intervals] for mode, saving in plan.savings.items()}


def draw(plan: FailurePlan, path: Path) -> None:
    import matplotlib.pyplot as plt

    least = min(saving.interval_s for saving in plan.savings.values()) / 10
    most = max(saving.interval_s for saving in plan.savings.values()) * 10
    intervals = [least * (most / least) ** (number / 99) for number in range(100)]
    figure, axes = plt.subplots(figsize=(8, 5))
    for mode, goodputs in goodput_curve(plan, intervals).items():
        line = axes.plot([interval / 60 for interval in intervals], [100 * goodput for goodput in goodputs], label=mode)[0]
        saving = plan.savings[mode]
        axes.plot([saving.interval_s / 60], [100 * saving.goodput], "o", color=line.get_color())
    axes.set(xscale="log", xlabel="minutes between checkpoints", ylabel="useful time, %", ylim=(0, 100))
    axes.set_title(f"a failure every {plan.mtbf_s / HOUR:.2g} h")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _describe(
    gpus: int, state: float, step_s: float, storage: float, rates: Rates, recovery: Recovery, worksheet: Worksheet
) -> Worksheet:
    ranges.GPUS.check("--gpus", gpus)
    ranges.BYTES.check("--state", state)
    ranges.STEP.check("--step", step_s)
    ranges.BYTES.check("--storage", storage)
    top = worksheet.part("failures")
    top.given("gpus", gpus)
    top.given("gpus_per_node", recovery.gpus_per_node)
    top.work_out("nodes", "ceil(gpus / gpus_per_node)")
    top.given("failures_per_gpu_hour", rates.total, "", rates.source)
    top.given("hardware_share", rates.hardware / rates.total, "", "share of failures after which a node must be replaced")
    top.work_out("mtbf_s", "3600 / (gpus * failures_per_gpu_hour)", "s", "any failure stops the whole run")
    top.given("state_bytes", state, "B", "one copy of weights and optimizer state")
    top.given("storage_bandwidth", storage, "B/s", "of the whole store")
    top.given("step_s", step_s, "s")
    top.work_out("save_s", "state_bytes / storage_bandwidth", "s")
    top.given("stall_share", recovery.stall_share, "", "share of an asynchronous save that stalls training")
    top.given("detect_s", recovery.detect_s, "s", "detection and diagnosis")
    top.given("start_s", recovery.start_s, "s", "processes and communicators")
    top.work_out("restart_s", "detect_s + start_s + save_s", "s", "loading takes as long as saving")
    top.given("peer_bandwidth", recovery.peer_bandwidth, "B/s", "of a node, into its neighbour's memory")
    top.work_out("copy_s", "state_bytes / nodes / peer_bandwidth", "s", "a node's share of the state to its neighbour")
    top.given("together", max(recovery.together, 1e-6), "", "share of failures that lose a node and its neighbour")
    _check_progress(top["restart_s"], top["mtbf_s"])
    if top["step_s"] + top["save_s"] > MOST_PER_FAILURE * top["mtbf_s"]:
        raise UserError(
            f"A step takes {show(step_s, 's')} and a save {show(top['save_s'], 's')}, with a failure every"
            f" {show(top['mtbf_s'], 's')}: the run never reaches its next save.",
            "Use fewer GPUs, shorter steps (a smaller --batch or --step) or faster --storage.",
        )
    return top


def _check_progress(restart: float, every: float) -> None:
    """Refuse a run that makes no progress. Above the limit, goodput is below e^-50 and the formula overflows."""
    if restart > MOST_PER_FAILURE * every:
        raise UserError(
            f"A restart takes {show(restart, 's')}, with a failure every {show(every, 's')}: the run makes no progress.",
            "Use faster --storage, fewer --gpus, or a shorter --detect.",
        )


def _save(mode: Mode, part: Worksheet) -> Saving:
    """Write the cost of a save and a restart in this mode, and the best interval."""
    if mode == "blocking":
        part.work_out("every_s", "mtbf_s", "s", "time between failures")
        part.work_out("back_s", "restart_s", "s")
        part.work_out("stall_s", "save_s", "s", "training waits for the whole save")
        part.given("lag_s", 0.0, "s", "a save is durable when it ends")
        part.work_out("least_interval_s", "step_s", "s")
    elif mode == "asynchronous":
        part.work_out("every_s", "mtbf_s", "s", "time between failures")
        part.work_out("back_s", "restart_s", "s")
        part.work_out("stall_s", "stall_share * save_s", "s", "the copy; the write overlaps with training")
        part.work_out("lag_s", "save_s", "s", "a save is durable when its write ends")
        part.work_out("least_interval_s", "max(step_s, save_s - stall_s)", "s", "one write at a time")
    else:
        part.given("storage_goodput", _write_second_level(part), "", "left by saves to storage and by failures that need them")
        part.work_out("every_s", "mtbf_s / (1 - together)", "s", "time between failures that the neighbour's copy survives")
        part.work_out("back_s", "detect_s + start_s + copy_s", "s", "the copy is read from the neighbour")
        part.work_out("stall_s", "stall_share * copy_s", "s")
        part.work_out("lag_s", "copy_s", "s")
        part.work_out("least_interval_s", "max(step_s, copy_s - stall_s)", "s", "one copy at a time")
    best = exact(part["stall_s"], part["every_s"])
    part.work_out("young_s", "sqrt(2 * stall_s * every_s)", "s", "Young's interval, for comparison")
    part.given("daly_s", daly(part["stall_s"], part["every_s"]), "s", "Daly's higher-order interval, for comparison")
    part.given("exact_s", best, "s", "every_s * x, where x + log(1 - x) + stall_s / every_s = 0 (largest goodput)")
    part.given("interval_steps", _whole_steps(best, part), "", "a whole number of steps")
    interval = part.work_out("interval_s", "interval_steps * step_s", "s")
    return Saving(mode, interval, int(part["interval_steps"]), _write_goodput(part), part)


def _write_second_level(part: Worksheet) -> float:
    """Write the second checkpoint level: asynchronous saves to storage, for failures that lose both copies in memory."""
    storage = part.part("from storage, when a node and its neighbour fail together")
    storage.work_out("every_s", "mtbf_s / together", "s", "time between failures of both")
    storage.work_out("back_s", "restart_s", "s")
    storage.work_out("stall_s", "stall_share * save_s", "s")
    storage.work_out("lag_s", "save_s", "s")
    best = max(exact(storage["stall_s"], storage["every_s"]), storage["save_s"], storage["step_s"])
    storage.given("interval_s", best, "s", "the best for these failures alone")
    return _write_goodput(storage)


def _write_goodput(part: Worksheet) -> float:
    formula = f"storage_goodput * {GOODPUT}" if "storage_goodput" in part else GOODPUT
    return part.work_out("useful", formula, "", "useful time over wall time, while enough nodes are up")


def _whole_steps(interval: float, part: Worksheet) -> int:
    """Round the interval to a whole number of steps, up or down, whichever has the higher goodput."""
    steps, least = interval / part["step_s"], math.ceil(part["least_interval_s"] / part["step_s"])
    return max(
        (max(least, math.floor(steps)), max(least, math.ceil(steps))), key=lambda count: _goodput(count * part["step_s"], part)
    )


def _goodput(interval: float, part: Worksheet) -> float:
    """Goodput at an interval; 0 where the interval is so long that the run almost never reaches its next save."""
    if interval > 100 * part["every_s"]:
        return 0.0
    tried = Worksheet("tried", part)
    tried.given("interval_s", interval, "s")
    return _write_goodput(tried)


def _write_spares(recovery: Recovery, top: Worksheet) -> int:
    """Write the number of spare nodes and the availability.

    Nodes fail while the run is up and return `repair_s` later. The run stops while more nodes are in repair than there are
    spares, and no node fails then. This is Erlang's loss system with spares + 1 servers, for any distribution of repair times.
    """
    top.given("repair_s", recovery.repair_s, "s")
    out = top.work_out("nodes_in_repair", "hardware_share * repair_s / mtbf_s", "", "on average, by Little's law")
    if out > top["nodes"]:
        raise UserError(
            f"With --repair {show(recovery.repair_s, 's')}, {out:,.0f} nodes would be in repair on average, and the run has"
            f" {top['nodes']:,.0f}.",
            "Use a shorter --repair or fewer --gpus.",
        )
    needed = smallest(lambda count: poisson_at_most(count - 1, out) >= recovery.confidence, MOST_SPARES)
    assert needed is not None, "spares for more nodes in repair than there are nodes"
    why = f"a spare is free when a node fails with probability {recovery.confidence:.4g} (Poisson)"
    top.given("spares_needed", needed, "", why)
    spares = needed if recovery.spares is None else recovery.spares
    top.given("spares", spares, "", "nodes")
    top.given(
        "stopped", erlang_b(spares + 1, out), "", "share of time with more nodes in repair than spares: Erlang's B(spares + 1)"
    )
    top.work_out("available", "1 - stopped")
    return spares


def _write_spot(spot: Spot, top: Worksheet) -> float:
    """Write the cost on spot instances. Preemptions add to failures, and the market replaces spares. A preemption with enough
    notice for a save loses no work; otherwise it counts as a failure."""
    part = top.part("spot")
    part.given("preemptions_per_hour", spot.preemptions_per_hour, "", "of one node")
    part.given("price_ratio", spot.price_ratio, "", "relative to on demand")
    part.given("notice_s", spot.notice_s, "s")
    part.given("wait_s", spot.wait_s, "s", "for a replacement node")
    part.work_out("preemptions_per_s", "preemptions_per_hour * nodes / 3600", "", "any preemption stops the whole run")
    if part["save_s"] <= spot.notice_s:
        part.work_out("preemption_s", "save_s + wait_s + start_s + save_s", "s", "the save fits into the notice: no work is lost")
        part.work_out("waits", "preemptions_per_s * preemption_s + hardware_share * wait_s / mtbf_s", "", "per second of running")
        part.work_out("spot_goodput", "best_goodput / (1 + waits)")
    else:
        part.work_out(
            "every_s", "1 / (1 / mtbf_s + preemptions_per_s)", "s", "failures and preemptions: no save fits into the notice"
        )
        part.work_out("back_s", "restart_s + wait_s", "s")
        _check_progress(part["back_s"], part["every_s"])
        part.work_out("stall_s", "stall_share * save_s", "s", "asynchronous saves")
        part.work_out("lag_s", "save_s", "s")
        best = max(exact(part["stall_s"], part["every_s"]), part["save_s"], part["step_s"])
        part.given("interval_s", best, "s", "the best for both together")
        part.work_out("spot_goodput", GOODPUT)
    formula = "nodes * gpus_per_node * dollars_per_gpu_hour * price_ratio / spot_goodput"
    return part.work_out("spot_dollars_per_useful_hour", formula, "$", "compare with dollars_per_useful_hour on demand")
