"""What failures cost a training run: how often something breaks, how often to save, and the share of time that is useful.

Failures are Poisson. Between two of them a run saves every `interval`; it stands still for `stall` at each save, a save can be
relied upon `lag` after that, and a failure costs the time until it is `back` plus all work since the last save that could be
relied upon. The mean over whole lives of a run, from one restart to the next failure, then gives the useful share of time
exactly (GOODPUT below, failures coming `every`; without lag it is Daly's, FGCS 2006).
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
MOST_PER_FAILURE = 50  # times the mean time between failures: beyond, the useful share of time is below e^-50
MOST_SPARES = 10**7  # as many as a run has GPUs
GOODPUT = "interval_s * exp(-(lag_s + back_s) / every_s) / (every_s * (exp((interval_s + stall_s) / every_s) - 1))"


@dataclass(frozen=True)
class Recovery:
    """How a cluster notices, restarts and repairs. The defaults are published figures where there are any."""

    # MegaScale, arXiv 2402.15627: detection and diagnosis take less than 10 minutes on average.
    detect_s: float = 600.0
    # The same: communicators over 10,000 GPUs in under 30 s; as much again for processes and the first, slow step.
    start_s: float = 60.0
    # Of the save, what training still waits for while a copy is made: 148.8 s became 6.3 s for 7B with PyTorch's asynchronous
    # distributed checkpoint (PyTorch blog, 2024).
    stall_share: float = 0.05
    # Into the neighbour's host memory, B/s of a node: what one 400 Gb/s card takes, of eight.
    peer_bandwidth: float = 50e9
    # Failures that take a node and the neighbour that holds its copy: an assumption. Gemini (SOSP 2023) counts 93% recovered
    # from memory even when two machines of sixteen always die together, and more the larger the cluster.
    together: float = 0.01
    repair_s: float = 24 * HOUR  # an assumption: a node is back the next day
    gpus_per_node: int = 8
    spares: int | None = None  # nodes; None: as many as `confidence` asks for
    confidence: float = 0.99  # that a spare is there when a node breaks


USUAL = Recovery()


@dataclass(frozen=True)
class Spot:
    """Machines that the provider may take back. Notice: 120 s on AWS, 30 s on Google Cloud and Azure."""

    preemptions_per_hour: float  # of one node
    price_ratio: float  # to on demand
    notice_s: float = 120.0
    wait_s: float = 300.0  # until another node is there


@dataclass(frozen=True)
class Saving:
    """One way to save, at its best interval. `goodput` is of the time in which there are nodes enough."""

    mode: Mode
    interval_s: float
    interval_steps: int
    goodput: float
    worksheet: Worksheet


@dataclass(frozen=True)
class FailurePlan:
    """`goodput` is the best mode's, times `available`: the share of time in which broken nodes do not exceed the spares."""

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


def mtbf(gpus: int, rates: Rates = FLEETS["llama3"]) -> float:
    """Seconds between two interruptions of a run that needs all of its GPUs."""
    return HOUR / (gpus * rates.total)


def young(save_s: float, mtbf_s: float) -> float:
    """Young 1974: right while saves are short against the time between failures."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Daly 2006, the higher-order estimate."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def exact(save_s: float, mtbf_s: float) -> float:
    """Where GOODPUT is largest: x = interval / mtbf solves (1 - x) e^x = e^(-save/mtbf), so that x = 1 + W(-e^(-1-save/mtbf))
    with Lambert's W. Halving finds x as well, and does not lose digits near W's branch point, where short saves lie."""
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
    """`storage_bandwidth` is of the whole store, as all GPUs together see it; they save and load at the same rate."""
    top = _describe(gpus, state_bytes, step_seconds, storage_bandwidth, rates, recovery, worksheet)
    savings = {mode: _save(mode, top.part(mode)) for mode in MODES}
    best = max(savings.values(), key=lambda saving: saving.goodput)
    top.given("best_goodput", best.goodput, "", f"of the ways to save, {best.mode} is the best")
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
    """Goodput (while there are nodes enough) against the interval between saves; peer memory's second level stays at its best."""
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
    top.given("hardware_share", rates.hardware / rates.total, "", "of the failures: those after which a node must be replaced")
    top.work_out("mtbf_s", "3600 / (gpus * failures_per_gpu_hour)", "s", "any failure stops the whole run")
    top.given("state_bytes", state, "B", "weights and optimizer, once")
    top.given("storage_bandwidth", storage, "B/s", "of the whole store")
    top.given("step_s", step_s, "s")
    top.work_out("save_s", "state_bytes / storage_bandwidth", "s")
    top.given("stall_share", recovery.stall_share, "", "of a save, what training waits for when the rest is written beside it")
    top.given("detect_s", recovery.detect_s, "s", "noticing and diagnosing")
    top.given("start_s", recovery.start_s, "s", "processes and communicators")
    top.work_out("restart_s", "detect_s + start_s + save_s", "s", "loading takes as long as saving")
    top.given("peer_bandwidth", recovery.peer_bandwidth, "B/s", "of a node, into its neighbour's memory")
    top.work_out("copy_s", "state_bytes / nodes / peer_bandwidth", "s", "a node's share of the state to its neighbour")
    top.given("together", max(recovery.together, 1e-6), "", "share of failures that take a node and its neighbour")
    _must_get_on(top["restart_s"], top["mtbf_s"])
    if top["step_s"] + top["save_s"] > MOST_PER_FAILURE * top["mtbf_s"]:
        raise UserError(
            f"A step takes {show(step_s, 's')}, a save {show(top['save_s'], 's')}, and something fails every"
            f" {show(top['mtbf_s'], 's')}: the run never gets to its next save.",
            "Use fewer GPUs, shorter steps (a smaller --batch or --step) or faster --storage.",
        )
    return top


def _must_get_on(restart: float, every: float) -> None:
    """Beyond this the useful share of time is below e^-50, and the formula's numbers overflow."""
    if restart > MOST_PER_FAILURE * every:
        raise UserError(
            f"A restart takes {show(restart, 's')} and something fails every {show(every, 's')}: the run never gets on.",
            "Use faster --storage, fewer --gpus, or a shorter --detect.",
        )


def _save(mode: Mode, part: Worksheet) -> Saving:
    """The lines that say what a save and a restart cost in this mode, and the best interval."""
    if mode == "blocking":
        part.work_out("every_s", "mtbf_s", "s", "time between failures")
        part.work_out("back_s", "restart_s", "s")
        part.work_out("stall_s", "save_s", "s", "training waits for the whole save")
        part.given("lag_s", 0.0, "s", "what is saved can be relied upon at once")
        part.work_out("least_interval_s", "step_s", "s")
    elif mode == "asynchronous":
        part.work_out("every_s", "mtbf_s", "s", "time between failures")
        part.work_out("back_s", "restart_s", "s")
        part.work_out("stall_s", "stall_share * save_s", "s", "the copy; the write goes on beside training")
        part.work_out("lag_s", "save_s", "s", "until the write has ended, only the save before can be relied upon")
        part.work_out("least_interval_s", "max(step_s, save_s - stall_s)", "s", "one write at a time")
    else:
        part.given(
            "storage_goodput", _write_second_level(part), "", "what saves to storage beneath, and failures that need them, leave"
        )
        part.work_out("every_s", "mtbf_s / (1 - together)", "s", "time between failures that leave the neighbour's copy")
        part.work_out("back_s", "detect_s + start_s + copy_s", "s", "the copy comes back from the neighbour")
        part.work_out("stall_s", "stall_share * copy_s", "s")
        part.work_out("lag_s", "copy_s", "s")
        part.work_out("least_interval_s", "max(step_s, copy_s - stall_s)", "s", "one copy at a time")
    best = exact(part["stall_s"], part["every_s"])
    part.work_out("young_s", "sqrt(2 * stall_s * every_s)", "s", "Young's interval, for comparison")
    part.given("daly_s", daly(part["stall_s"], part["every_s"]), "s", "Daly's higher-order interval, for comparison")
    part.given("exact_s", best, "s", "every_s * x, where x + log(1 - x) + stall_s / every_s = 0: there goodput is largest")
    part.given("interval_steps", _whole_steps(best, part), "", "a save falls between two steps")
    interval = part.work_out("interval_s", "interval_steps * step_s", "s")
    return Saving(mode, interval, int(part["interval_steps"]), _write_goodput(part), part)


def _write_second_level(part: Worksheet) -> float:
    """Asynchronous saves to storage beneath those to memory, for the few failures that memory does not survive."""
    storage = part.part("from storage, when a node and its neighbour die together")
    storage.work_out("every_s", "mtbf_s / together", "s", "time between such failures")
    storage.work_out("back_s", "restart_s", "s")
    storage.work_out("stall_s", "stall_share * save_s", "s")
    storage.work_out("lag_s", "save_s", "s")
    best = max(exact(storage["stall_s"], storage["every_s"]), storage["save_s"], storage["step_s"])
    storage.given("interval_s", best, "s", "the best for these failures alone")
    return _write_goodput(storage)


def _write_goodput(part: Worksheet) -> float:
    formula = f"storage_goodput * {GOODPUT}" if "storage_goodput" in part else GOODPUT
    return part.work_out("useful", formula, "", "useful time over wall time, while there are nodes enough")


def _whole_steps(interval: float, part: Worksheet) -> int:
    """The better of the two whole numbers of steps around the best interval."""
    steps, least = interval / part["step_s"], math.ceil(part["least_interval_s"] / part["step_s"])
    return max(
        (max(least, math.floor(steps)), max(least, math.ceil(steps))), key=lambda count: _goodput(count * part["step_s"], part)
    )


def _goodput(interval: float, part: Worksheet) -> float:
    """0 where a run that saves so seldom hardly ever gets to its next save."""
    if interval > 100 * part["every_s"]:
        return 0.0
    tried = Worksheet("tried", part)
    tried.given("interval_s", interval, "s")
    return _write_goodput(tried)


def _write_spares(recovery: Recovery, top: Worksheet) -> int:
    """Nodes break while the run goes on and come back `repair_s` later; it stands still while more are out than there are
    spares, and then nothing breaks. That is Erlang's loss system with spares + 1 places, whatever repairs' distribution."""
    top.given("repair_s", recovery.repair_s, "s")
    out = top.work_out("nodes_in_repair", "hardware_share * repair_s / mtbf_s", "", "on average, by Little's law")
    if out > top["nodes"]:
        raise UserError(
            f"With a repair of {show(recovery.repair_s, 's')}, {out:,.0f} nodes would be broken on average, and the run has"
            f" {top['nodes']:,.0f}.",
            "Give a shorter --repair, or fewer --gpus.",
        )
    needed = smallest(lambda count: poisson_at_most(count - 1, out) >= recovery.confidence, MOST_SPARES)
    assert needed is not None, "spares for more nodes in repair than there are nodes"
    why = f"when a node breaks, fewer are out already with a chance of {recovery.confidence:.4g} (Poisson)"
    top.given("spares_needed", needed, "", why)
    spares = needed if recovery.spares is None else recovery.spares
    top.given("spares", spares, "", "nodes")
    top.given("stopped", erlang_b(spares + 1, out), "", "share of time with more nodes out than spares: Erlang's B(spares + 1)")
    top.work_out("available", "1 - stopped")
    return spares


def _write_spot(spot: Spot, top: Worksheet) -> float:
    """Preemptions come on top of failures, and the market takes the place of spares. A preemption that leaves time for a save
    loses no work; else it is one failure more."""
    part = top.part("spot")
    part.given("preemptions_per_hour", spot.preemptions_per_hour, "", "of one node")
    part.given("price_ratio", spot.price_ratio, "", "to on demand")
    part.given("notice_s", spot.notice_s, "s")
    part.given("wait_s", spot.wait_s, "s", "for another node")
    part.work_out("preemptions_per_s", "preemptions_per_hour * nodes / 3600", "", "any of them stops the whole run")
    if part["save_s"] <= spot.notice_s:
        part.work_out("preemption_s", "save_s + wait_s + start_s + save_s", "s", "the save fits into the notice: no work is lost")
        part.work_out("waits", "preemptions_per_s * preemption_s + hardware_share * wait_s / mtbf_s", "", "per second of running")
        part.work_out("spot_goodput", "best_goodput / (1 + waits)")
    else:
        part.work_out(
            "every_s", "1 / (1 / mtbf_s + preemptions_per_s)", "s", "failures and preemptions: no save fits into the notice"
        )
        part.work_out("back_s", "restart_s + wait_s", "s")
        _must_get_on(part["back_s"], part["every_s"])
        part.work_out("stall_s", "stall_share * save_s", "s", "saved beside training")
        part.work_out("lag_s", "save_s", "s")
        best = max(exact(part["stall_s"], part["every_s"]), part["save_s"], part["step_s"])
        part.given("interval_s", best, "s", "the best for both together")
        part.work_out("spot_goodput", GOODPUT)
    formula = "nodes * gpus_per_node * dollars_per_gpu_hour * price_ratio / spot_goodput"
    return part.work_out("spot_dollars_per_useful_hour", formula, "$", "against dollars_per_useful_hour on demand")
