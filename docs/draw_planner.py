"""Draws the figures of docs/planner.md from the planner's own functions.

PYTHONPATH=platform .venv/bin/python docs/draw_planner.py
"""

from pathlib import Path

from matplotlib.figure import Figure

from strata.planner.cluster import draw as queue_plot
from strata.planner.cluster.jobs import Team, generate
from strata.planner.cluster.policies import POLICIES
from strata.planner.cluster.simulate import simulate as simulate_queue
from strata.planner.layout import Schedule
from strata.planner.pipeline.simulate import even, simulate
from strata.planner.pipeline.timeline import draw
from strata.planner.validation.check_collectives import published_allreduce

FOLDER = Path(__file__).parent / "planner"
STAGES, MICRO_BATCHES = 4, 8


def timeline(schedule: Schedule, interleave: int, title: str) -> None:
    """Draws a schedule with equal times for forward, gradient of inputs and gradient of weights, and links without latency."""
    part = 1.0 / interleave
    simulation = simulate(schedule, STAGES, MICRO_BATCHES, interleave, even(STAGES * interleave, part, part, part))
    draw(simulation, FOLDER / f"{schedule}.png", title)


def allreduce() -> None:
    """Draws measured and planned all-reduce bandwidth of eight H200 by buffer size."""
    rows = published_allreduce()
    sizes = [row.bytes for row in rows]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(sizes, [row.measured_busbw / 1e9 for row in rows], "o", color="#e39a3b", label="measured, 8 x H200")
    axes.plot(sizes, [row.predicted_busbw / 1e9 for row in rows], color="#5b8fc7", label="planned")
    change = next(row for row in rows if row.algorithm.startswith("nvls"))
    axes.axvline(change.bytes / 2**0.5, color="gray", linestyle="--", linewidth=0.8)
    axes.text(change.bytes / 2, 330, "ring, LL", ha="right", color="#57606a")
    axes.text(change.bytes, 330, "NVLS", color="#57606a")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes[::3], [_bytes(size) for size in sizes[::3]])
    axes.set(xlabel="buffer of a rank", ylabel="bus bandwidth, GB/s", ylim=(0, 500))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(FOLDER / "allreduce.png", dpi=110)


def queue() -> None:
    """Draws utilisation and waiting jobs of the trace of docs/results/planner.md under every policy."""
    jobs = generate(512, 3000, 0.95, {"a": 3, "b": 1}, 1)
    teams = [Team("a", 256), Team("b", 256)]
    outcomes = [simulate_queue(jobs, 64, 8, policy, teams, 8) for policy in POLICIES.values()]
    queue_plot.draw(outcomes, FOLDER / "queue.png", "3,000 jobs on 512 GPUs, load 0.95")


def _bytes(size: float) -> str:
    unit, factor = next(pair for pair in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if size >= pair[1])
    return f"{size / factor:g} {unit}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    timeline("1f1b", 1, "1F1B")
    timeline("zbv", 2, "ZBV")
    allreduce()
    queue()
