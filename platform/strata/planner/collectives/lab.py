"""Collectives lab: algorithms step by step, predicted time by size, and measurements on this machine."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from strata.planner.collectives import algorithms
from strata.planner.collectives.algorithms import Algorithm, Transfer
from strata.planner.collectives.cost import Cost, Links, cost, costs_of_all
from strata.planner.collectives.patterns import Kind, Place
from strata.platform.errors import UserError

SIZES = tuple(2.0**power for power in range(10, 33))  # 1 KiB to 4 GiB
MOST_RANKS_SHOWN = 32
HIERARCHICAL = "hierarchical"
Measurable = Literal["all_reduce", "all_gather", "all_to_all"]
MEASURABLE: tuple[Measurable, ...] = ("all_reduce", "all_gather", "all_to_all")
MEASURE_SECONDS = 120.0


@dataclass(frozen=True)
class Crossover:
    """The size from which `after` is faster than `before`."""

    size: float
    before: str
    after: str


@dataclass(frozen=True)
class Measured:
    """A measured and a predicted time. `anchor` marks the two sizes that the prediction was fitted to."""

    kind: Measurable
    size: int
    seconds: float
    predicted: float
    backend: str
    anchor: bool


def show(name: str, ranks: int, inside: int | None = None) -> Table:
    """Table of the transfers of each step. `inside` is the size of a domain, for the hierarchical algorithm only."""
    algorithm = _algorithm(name, ranks, inside)
    sent = [algorithm.sent(rank) for rank in range(ranks)]
    spread = f"{min(sent):.3g}" if min(sent) == max(sent) else f"{min(sent):.3g} to {max(sent):.3g}"
    work = f"{len(algorithm.steps)} steps; a rank sends {spread} times its buffer, cut into {algorithm.chunks}"
    caption = f"{work}. + adds, = copies"
    table = Table(title=f"{name}, {ranks} ranks", box=None, header_style="bold", caption=caption, caption_justify="left")
    table.add_column("step", justify="right")
    table.add_column("source → target: chunks")
    for number, step in enumerate(algorithm.steps, 1):
        table.add_row(str(number), Text("   ".join(_transfer(one, algorithm) for one in step)))
    return table


def _algorithm(name: str, ranks: int, inside: int | None) -> Algorithm:
    if not 2 <= ranks <= MOST_RANKS_SHOWN:
        raise UserError(f"{ranks} ranks cannot be shown step by step.", f"Choose 2 to {MOST_RANKS_SHOWN} ranks.")
    if name == HIERARCHICAL:
        if not inside or ranks % inside:
            raise UserError(
                f"The hierarchical algorithm needs domains of one size, not {ranks} ranks in domains of {inside}.",
                "Set the ranks per domain to a divisor of all ranks.",
            )
        return algorithms.hierarchical(inside, ranks // inside)
    if name not in algorithms.BY_NAME:
        known = ", ".join([*algorithms.BY_NAME, HIERARCHICAL])
        raise UserError(f"There is no algorithm '{name}'.", f"Choose one of {known}.")
    return algorithms.BY_NAME[name](ranks)


def _transfer(one: Transfer, algorithm: Algorithm) -> str:
    source, target = (f"{node}" if node < algorithm.ranks else "switch" for node in (one.source, one.target))
    if algorithm.name == "pairwise":
        return f"{source}→{target}"  # the block of its target
    return f"{source}→{target}:{'+' if one.action == 'add' else '='}{_ranges(one.chunks)}"


def _ranges(chunks: tuple[int, ...]) -> str:
    """Compact form: 0, 1, 2, 5 is written 0-2,5."""
    runs = [[chunk for _, chunk in run] for _, run in groupby(enumerate(sorted(chunks)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def by_algorithm(kind: Kind, size: float, place: Place, links: Links) -> dict[str, float]:
    """Seconds of each algorithm under its fastest protocol. NCCL has no hierarchical all-reduce of rings; here it is the three
    calls that a program would make."""
    seconds: dict[str, float] = {}
    for one in costs_of_all(kind, size, place, links):
        seconds[one.algorithm] = min(one.seconds, seconds.get(one.algorithm, one.seconds))
    if kind == "all_reduce" and place.inside > 1 and place.domains > 1:
        near, far = Place(place.inside), Place(1, place.domains, place.shared * place.inside)
        seconds[HIERARCHICAL] = (
            cost("reduce_scatter", size, near, links).seconds
            + cost("all_reduce", size / place.inside, far, links).seconds
            + cost("all_gather", size, near, links).seconds
        )
    return seconds


def crossovers(kind: Kind, place: Place, links: Links) -> list[Crossover]:
    """Sizes at which another algorithm or protocol becomes the fastest, to a thousandth."""
    found = []
    for low, high in pairwise(SIZES):
        while (before := _name(cost(kind, low, place, links))) != _name(cost(kind, high, place, links)):
            same, other = low, high
            while other / same > 1.001:
                middle = (same * other) ** 0.5
                if _name(cost(kind, middle, place, links)) == before:
                    same = middle
                else:
                    other = middle
            found.append(Crossover(other, before, _name(cost(kind, other, place, links))))
            low = other
    return found


def costs(kind: Kind, place: Place, links: Links) -> Table:
    """Table of time and bus bandwidth by size, with the fastest algorithm."""
    names = list(by_algorithm(kind, SIZES[0], place, links))
    changes = [f"from {_bytes(one.size)} {one.after} instead of {one.before}" for one in crossovers(kind, place, links)]
    where = f"{place.domains} domains of {place.inside} ranks" if place.domains > 1 else f"{place.inside} ranks in one domain"
    caption = Text("\n".join(changes) or "the same algorithm at every size")
    table = Table(title=f"{kind}, {where}", box=None, header_style="bold", caption=caption, caption_justify="left")
    table.add_column("size", justify="right")
    table.add_column("fastest")
    for column in ("time", "bus GB/s", *names):
        table.add_column(column, justify="right")
    previous = ""
    for size in SIZES:
        best = cost(kind, size, place, links)
        seconds, name = by_algorithm(kind, size, place, links), _name(best)
        table.add_row(
            _bytes(size),
            Text(name, style="bold" if name != previous else ""),
            _time(best.seconds),
            f"{best.busbw / 1e9:,.1f}",
            *[Text(_time(seconds[one]), style="bold" if one == best.algorithm else "dim") for one in names],
        )
        previous = name
    return table


def plot(kind: Kind, place: Place, links: Links, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    curves = [by_algorithm(kind, size, place, links) for size in SIZES]
    for name in curves[0]:
        axes.plot(SIZES, [seconds[name] * 1e6 for seconds in curves], marker=".", label=name)
    for one in crossovers(kind, place, links):
        axes.axvline(one.size, color="gray", linestyle="--", linewidth=0.8)
        label = f" {_bytes(one.size)}: {one.after}"
        axes.text(one.size, 0.98, label, rotation=90, va="top", fontsize=7, transform=axes.get_xaxis_transform())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = SIZES[::2]
    axes.set_xticks(ticks, [_bytes(size) for size in ticks], rotation=45, ha="right")
    title = f"{kind}, {place.inside} ranks a domain, {place.domains} domain{'s' * (place.domains > 1)}"
    axes.set(xlabel="buffer of a rank", ylabel="time (µs)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))


def measure(
    ranks: int, sizes: Sequence[int], kinds: Sequence[Measurable] = MEASURABLE, links: Links | None = None
) -> list[Measured]:
    """Measure collectives between `ranks` processes on this machine: NCCL where there is a GPU for each, otherwise gloo.

    With the `links` of this machine's GPUs, NCCL is compared with the model. Gloo's latency and bandwidth are in no catalogue:
    the smallest and the largest size determine both (time = alpha + beta x size), and the sizes between them are predicted.
    """
    if ranks < 2 or len(sizes) < 2:
        raise UserError(f"{ranks} ranks and {len(sizes)} sizes are too few to measure.", "Choose at least 2 of each.")
    if find_spec("torch") is None:
        raise UserError("Measuring needs torch, which is not installed here.", "Install the laptop or the gpu profile.")
    import torch

    backend = "nccl" if torch.cuda.device_count() >= ranks else "gloo"
    taken = _run_workers(backend, ranks, sorted({_whole(size, ranks) for size in sizes}), kinds)
    results: list[Measured] = []
    for kind in kinds:
        seconds = taken[kind]
        least, most = min(seconds), max(seconds)
        beta = max(0.0, (seconds[most] - seconds[least]) / (most - least))
        alpha = max(0.0, seconds[least] - beta * least)
        for size, actual in seconds.items():
            if backend == "nccl" and links:
                results.append(Measured(kind, size, actual, cost(kind, size, Place(ranks), links).seconds, backend, False))
            else:
                results.append(Measured(kind, size, actual, alpha + beta * size, backend, size in (least, most)))
    return results


def measured_table(results: list[Measured]) -> Table:
    anchored = any(one.anchor for one in results)
    note = "* alpha and beta of time = alpha + beta x size are fitted to these two sizes; the others are predicted"
    table = Table(box=None, header_style="bold", caption=note if anchored else None, caption_justify="left")
    table.add_column("collective")
    for column in ("size", "measured", "predicted", "error"):
        table.add_column(column, justify="right")
    for one in results:
        error = "*" if one.anchor else f"{one.predicted / one.seconds - 1:+.0%}"
        table.add_row(f"{one.kind} ({one.backend})", _bytes(one.size), _time(one.seconds), _time(one.predicted), error)
    return table


def _whole(size: int, ranks: int) -> int:
    """Round to a buffer with the same number of 4-byte values for each rank."""
    return max(1, round(size / (4 * ranks))) * 4 * ranks


def _run_workers(backend: str, ranks: int, sizes: list[int], kinds: Sequence[Measurable]) -> dict[Measurable, dict[int, float]]:
    with tempfile.TemporaryDirectory(prefix="strata-lab-") as folder:
        workers = []
        for rank in range(ranks):
            job = {"backend": backend, "ranks": ranks, "rank": rank, "sizes": sizes, "kinds": list(kinds), "folder": folder}
            command = [sys.executable, "-m", "strata.planner.collectives.lab_worker", json.dumps(job)]
            with (Path(folder) / f"{rank}.log").open("wb") as log:
                env = os.environ | {"OMP_NUM_THREADS": "1"}
                workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
        try:
            _await(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        outcome = Path(folder) / "outcome.json"
        if not outcome.exists():
            log_tail = (Path(folder) / "0.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise UserError(
                f"The ranks did not finish within {MEASURE_SECONDS:.0f} s: {' '.join(log_tail) or 'no message'}",
                "Choose fewer ranks or smaller sizes.",
            )
        read: dict[Measurable, dict[str, float]] = json.loads(outcome.read_text())
        return {kind: {int(size): seconds for size, seconds in by_size.items()} for kind, by_size in read.items()}


def _await(workers: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all workers have succeeded, one has failed, or the time limit has passed."""
    deadline = time.monotonic() + MEASURE_SECONDS
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        if all(code == 0 for code in codes) or any(codes):
            return
        time.sleep(0.05)


def _name(one: Cost) -> str:
    return f"{one.algorithm}/{one.protocol}"


def _bytes(size: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"
