"""Pictures of layouts.md, as SVG that is readable on light and dark pages.

The pictures are computed from the code they show: timelines from DeepSpeed's schedules, rank positions from `layout.place`,
shards of matrices and experts from the functions that training and checkpoints use.

    .venv/bin/python docs/draw_layouts.py
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for a GPU on import

from deepspeed.runtime.pipe import schedule

from strata.platform import recipe_file
from strata.platform.recipe import ParallelSection
from strata.training.layout import place
from strata.training.parallel.shard_map import local_shards
from strata.training.parallel.tensor import split_dimension

FOLDER = Path(__file__).parent / "layouts"
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
INK, FAINT, LINE, PAPER, BLANK = "#1f2328", "#57606a", "#8c959f", "#ffffff", "#eef1f4"
RED, PINK = "#b3261e", "#ffe3e3"  # communication
WORKERS = ["#9ec5fe", "#ffcf99", "#a8dfb4", "#d9c2f5"]  # light enough for dark text on each

# A backward pass takes twice as long as a forward pass; a DualPipeV part of the model is half a 1F1B stage.
LENGTHS = {False: {"F": 2, "B": 4}, True: {"F": 1, "B": 2}}


class Picture:
    def __init__(self, name: str, width: int, height: int, title: str) -> None:
        self.name, self.width, self.height = name, width, height
        self._parts = [f"<title>{escape(title)}</title>"]
        tip = f'<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/>'
        marker = 'id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse"'
        self._parts.append(f"<defs><marker {marker}>{tip}</marker></defs>")
        self.box(0.5, 0.5, width - 1, height - 1, PAPER, line="#d0d7de", radius=8)

    def box(self, x: float, y: float, width: float, height: float, fill: str, line: str = LINE, radius: float = 2) -> None:
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {size} rx="{radius:g}" fill="{fill}" stroke="{line}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: object,
        anchor: Literal["start", "middle", "end"] = "start",
        fill: str = INK,
        size: int = 13,
        bold: bool = False,
    ) -> None:
        font = f'font-size="{size}" font-weight="{600 if bold else 400}"'
        self._parts.append(f'<text x="{x:g}" y="{y:g}" {font} text-anchor="{anchor}" fill="{fill}">{escape(str(words))}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: Literal["plain", "arrow", "double", "dashed"]) -> None:
        extra = 'stroke-dasharray="5 4"' if style == "dashed" else ""
        if style in ("arrow", "double"):
            extra = 'marker-end="url(#tip)"' + (' marker-start="url(#tip)"' if style == "double" else "")
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self._parts.append(f'<line {ends} stroke="{RED if style == "dashed" else FAINT}" stroke-width="1.5" {extra}/>')

    def save(self) -> None:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}">'
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{self.name}.svg").write_text("\n".join([head, *self._parts, "</svg>\n"]))


def zero() -> None:
    """Bytes per parameter in bf16: weights, gradients, and optimizer state (fp32 weights and two moments)."""
    kinds = [("W", 2, 3), ("G", 2, 2), ("optimizer", 12, 1)]  # bytes, and the first ZeRO stage that shards it
    workers, unit, row = 4, 9, 74
    picture = Picture("zero", 860, 80 + 4 * row, "Memory of each of four data-parallel workers, by ZeRO stage")
    for worker in range(workers):
        picture.text(222 + worker * 158, 30, f"worker {worker}", "middle", bold=True)
    picture.text(844, 30, "bytes", "end", FAINT)
    for stage, sharded in enumerate(["no sharding", "optimizer", "+ gradients", "+ weights"]):
        y = 48 + stage * row
        picture.text(16, y + 20, f"zero: {stage}", size=14, bold=True)
        picture.text(16, y + 40, sharded, fill=FAINT)
        for worker in range(workers):
            x = 150 + worker * 158
            for kind, size, sharded_from in kinds:
                parts = workers if stage >= sharded_from else 1
                mine = size * unit / parts
                picture.box(x, y, size * unit, 46, BLANK, line="#d0d7de")
                picture.box(x + worker % parts * mine, y, mine, 46, WORKERS[worker])
                picture.text(x + size * unit / 2, y + 62, kind, "middle", FAINT)
                x += size * unit
        total = sum(size / (workers if stage >= sharded_from else 1) for _, size, sharded_from in kinds)
        picture.text(844, y + 29, f"{total:g}", "end", size=15, bold=True)
    words = (
        "W weights, G gradients, optimizer: fp32 weights and Adam's moments. Grey: on another worker. Bytes are per parameter."
    )
    picture.text(16, 64 + 4 * row, words, fill=FAINT)
    picture.save()


def tensor() -> None:
    """One layer on two workers. Matrices are drawn for x @ W: a column of W computes a column of the output."""
    picture = Picture("tensor", 830, 296, "One layer partitioned over two tensor-parallel workers")
    lanes, size, halves = (62, 176), 40, 2
    cuts = {name: split_dimension(f"model.layers.0.{name}_proj.weight") for name in ("q", "k", "v", "o", "gate", "up", "down")}
    for worker, y in enumerate(lanes):
        picture.text(14, y + 24, f"worker {worker}", bold=True)
        picture.line(80, y + 20, 816, y + 20, "arrow")
    x = 92
    for block in (("q", "k", "v"), "attention|its heads", ("o",), ("gate", "up"), "SiLU|its columns", ("down",)):
        if isinstance(block, str):
            for worker, y in enumerate(lanes):
                picture.box(x, y, 84, size, WORKERS[worker], radius=6)
                for line, words in enumerate(block.split("|")):
                    picture.text(x + 42, y + 17 + 16 * line, words, "middle", FAINT if line else INK)
            x += 106
            continue
        by_columns = all(cuts[name] == 0 for name in block)  # torch stores weights transposed: dimension 0 is the output
        words = "by columns" if by_columns else "by rows"
        picture.text(x + (len(block) * (size + 12) - 12) / 2, 252, words, "middle", FAINT)
        for name in block:
            for worker, y in enumerate(lanes):
                picture.box(x, y, size, size, BLANK)
                part = size / halves
                mine = (x + worker * part, y, part, size) if by_columns else (x, y + worker * part, size, part)
                picture.box(*mine, WORKERS[worker])
                picture.text(x + size / 2, y + size + 17, name, "middle")
            x += size + 12
        x += 10
        if not by_columns:
            picture.box(x, lanes[0] - 16, 26, lanes[1] - lanes[0] + 72, PINK, line=RED, radius=4)
            picture.text(x + 13, 145, "Σ", "middle", size=18, bold=True)
            picture.text(x + 13, 34, "all-reduce", "middle", RED)
            x += 48
    rows, columns = (list(cuts.values()).count(dimension) for dimension in (1, 0))
    words = (
        f"All-reduces per layer: {rows} forward, {columns} backward (input gradients of the matrices that are split by columns)."
    )
    picture.text(14, 280, words, fill=FAINT)
    picture.save()


Message = tuple[tuple[int, int], bool, int, int]  # (sender, receiver), is an activation, phase, micro-batch


@dataclass(frozen=True)
class Compute:
    kind: str  # F or B
    phase: int
    micro_batch: int


@dataclass(frozen=True)
class Exchange:
    sends: frozenset[Message]
    receives: frozenset[Message]


@dataclass
class Rank:
    """Simulation state of one stage: remaining steps, current time, and computed blocks with their start times."""

    todo: list[Compute | Exchange]
    time: int = 0
    blocks: list[tuple[int, Compute]] = field(default_factory=list)


def run_schedule(stages: int, micro_batches: int, dual: bool) -> list[Rank]:
    """Simulates DeepSpeed's schedule on all stages. Communication takes no time but waits for the peer."""
    kind = schedule.DualPipeVSchedule if dual else schedule.TrainSchedule
    ranks = [Rank(plan(kind(micro_batches, stages, stage), immediately=not dual)) for stage in range(stages)]
    sent: dict[Message, int] = {}
    awaited: dict[Message, int] = {}
    while left := sum(len(rank.todo) for rank in ranks):
        for rank in ranks:
            while rank.todo and _done(rank, sent, awaited, LENGTHS[dual]):
                rank.todo.pop(0)
        assert sum(len(rank.todo) for rank in ranks) < left, "the schedule deadlocks"
    return ranks


def _done(rank: Rank, sent: dict[Message, int], awaited: dict[Message, int], lengths: dict[str, int]) -> bool:
    step = rank.todo[0]
    if isinstance(step, Compute):
        rank.blocks.append((rank.time, step))
        rank.time += lengths[step.kind]
        return True
    for message in step.sends:
        sent.setdefault(message, rank.time)
    for message in step.receives:
        awaited.setdefault(message, rank.time)
    if not (step.sends <= awaited.keys() and step.receives <= sent.keys()):
        return False
    rank.time = max(rank.time, *(awaited[m] for m in step.sends), *(sent[m] for m in step.receives))
    return True


def plan(instructions: schedule.PipeSchedule, immediately: bool) -> list[Compute | Exchange]:
    """Steps of one stage. 1F1B exchanges messages one at a time, DualPipeV all that are queued at a commit."""
    here = instructions.stage_id
    seen: Counter[tuple[str, int]] = Counter()
    steps: list[Compute | Exchange] = []
    queue: dict[bool, set[Message]] = {True: set(), False: set()}
    for instruction in (one for step in instructions.steps() for one in step):
        name, phase = instruction.name, getattr(instruction, "phase", 0)
        if name in ("ForwardPass", "BackwardPass"):
            steps.append(Compute(name[0], phase, seen[name, phase]))
        elif name.startswith(("Send", "Recv")):
            sends, activation = name.startswith("Send"), name.endswith("Activation")
            ahead = 1 if sends == activation else -1  # activations go to the next stage, gradients come from there
            peer = here + (ahead if phase == 0 else -ahead)  # the second half of DualPipeV runs in reverse order
            ends = (here, peer) if sends else (peer, here)
            queue[sends].add((ends, activation, phase, seen[name, phase]))
        if (immediately or name == "CommitP2P") and any(queue.values()):
            steps.append(Exchange(frozenset(queue[True]), frozenset(queue[False])))
            queue = {True: set(), False: set()}
        seen[name, phase] += 1
    assert not any(queue.values())
    return steps


def idle(ranks: list[Rank], dual: bool) -> float:
    busy = sum(LENGTHS[dual][step.kind] for _, step in ranks[0].blocks)  # all stages have the same amount of work
    return 1 - busy / max(rank.time for rank in ranks)


def in_flight(rank: Rank) -> int:
    """Peak number of micro-batches (of half stages, with DualPipeV) with stored activations."""
    return max(accumulate(1 if step.kind == "F" else -1 for _, step in rank.blocks))


def timeline(name: str, dual: bool, longest: int) -> None:
    stages, micro_batches = 4, 8
    ranks = run_schedule(stages, micro_batches, dual)
    left, unit, row = 74, 12, 44
    title = f"{'DualPipeV' if dual else '1F1B'}, {stages} stages, {micro_batches} micro-batches"
    picture = Picture(name, left + longest * unit + 20, 90 + stages * row, title)
    right = picture.width - 16
    picture.text(16, 30, title, size=15, bold=True)
    peaks = ", ".join(str(in_flight(rank)) for rank in ranks)
    words = f"{idle(ranks, dual):.0%} idle; peak activations, in {'half ' if dual else ''}stages: {peaks}"
    picture.text(right, 30, words, "end", FAINT)
    colours = {("F", 0): "#9ec5fe", ("B", 0): "#a8dfb4", ("F", 1): "#5b9bf3", ("B", 1): "#57b870"}
    for stage, rank in enumerate(ranks):
        y = 48 + stage * row
        picture.text(16, y + 22, f"stage {stage}")
        picture.box(left, y, longest * unit, 34, BLANK, line=BLANK)
        for begin, step in rank.blocks:
            x, width = left + begin * unit, LENGTHS[dual][step.kind] * unit
            picture.box(x, y, width, 34, colours[step.kind, step.phase], line=PAPER)
            picture.text(x + width / 2, y + 22, step.micro_batch, "middle")
    end = left + max(rank.time for rank in ranks) * unit
    picture.line(end, 44, end, 48 + stages * row, "dashed")
    legend = {("F", 0): "forward", ("B", 0): "backward"}
    if dual:
        legend = {("F", 0): "forward, out", ("F", 1): "forward, back", ("B", 1): "backward, out", ("B", 0): "backward, back"}
    x, y = left, 48 + stages * row + 8
    for key, words in legend.items():
        picture.box(x, y, 18, 18, colours[key], line=PAPER)
        picture.text(x + 24, y + 14, words)
        x += 140
    picture.text(right, y + 14, "time →", "end", FAINT)
    picture.save()


def sequence() -> None:
    parallel = ParallelSection(workers=4, sequence=4)
    owners = {place(rank, parallel).sequence: rank for rank in range(parallel.workers)}
    tokens, heads, cell, top = 8, 4, 22, 66
    picture = Picture("sequence", 860, 242, "Ulysses: all-to-alls exchange slices of the sequence for slices of the heads")
    width, middle = tokens * cell, top + heads * cell / 2
    for panel, words in enumerate(["projections, rotation", "attention", "output, feed-forward"]):
        x = 64 + panel * (width + 108)
        picture.text(x + width / 2, 34, words, "middle", size=14, bold=True)
        picture.text(x + width / 2, 54, f"{tokens} tokens →", "middle", FAINT)
        for token in range(tokens):
            for head in range(heads):
                share = head * parallel.sequence // heads if words == "attention" else token * parallel.sequence // tokens
                picture.box(x + token * cell, top + head * cell, cell, cell, WORKERS[owners[share]], line=PAPER)
        note = f"each {'head' if words == 'attention' else 'token'} on one worker"
        picture.text(x + width / 2, top + heads * cell + 24, note, "middle", FAINT)
        if panel:
            picture.line(x - 98, middle, x - 8, middle, "arrow")
            picture.text(x - 54, middle - 10, "all-to-all", "middle", RED)
    picture.text(56, middle + 5, "heads", "end", FAINT)
    for rank in range(parallel.workers):
        picture.box(134 + rank * 160, 204, 20, 20, WORKERS[rank], line=PAPER)
        picture.text(162 + rank * 160, 219, f"worker {rank}")
    picture.save()


def expert() -> None:
    parallel, model = ParallelSection(workers=4, expert=2), recipe_file.load("laptop-moe").model
    assert model.moe
    shape = (model.moe.experts // parallel.expert, model.ffn, model.hidden)
    picture = Picture("expert", 860, 330, "Eight experts on each pair of four data-parallel workers")
    pitch, width = 206, 194
    owners: dict[tuple[int, ...], list[int]] = {}
    for rank in range(parallel.workers):
        x, centre = 24 + rank * pitch, 24 + rank * pitch + width / 2
        local = local_shards("model.layers.0.mlp.experts.w1", shape, model, parallel, place(rank, parallel))
        numbers = tuple(int(shard.name.split(".")[5]) for shard in local)
        owners.setdefault(numbers, []).append(rank)
        picture.text(centre, 32, f"worker {rank}", "middle", size=14, bold=True)
        picture.box(x, 46, width, 40, WORKERS[rank], radius=6)
        picture.text(centre, 71, "attention, router: its tokens", "middle")
        picture.line(centre, 88, centre, 112, "double")
        picture.line(centre, 146, centre, 170, "double")
        part = width / len(numbers)
        for i, number in enumerate(numbers):
            picture.box(x + i * part, 172, part - 3, 42, ["#ffe08a", "#bfe6ea"][list(owners).index(numbers)], radius=6)
            picture.text(x + (i + 0.5) * part - 1.5, 198, number, "middle", size=15)
        picture.text(centre, 234, "experts", "middle", FAINT)
    for first in range(0, parallel.workers, parallel.expert):
        x, wide = 24 + first * pitch, parallel.expert * pitch - 12
        picture.box(x, 114, wide, 30, PINK, line=RED, radius=4)
        picture.text(x + wide / 2, 134, "all-to-all: tokens to their experts, and back", "middle")
    for line, (numbers, ranks) in enumerate(owners.items()):
        first, last = (24 + rank * pitch + width / 2 for rank in (ranks[0], ranks[-1]))
        y = 258 + line * 32
        picture.line(first, y, last, y, "double")
        words = f"experts {numbers[0]} to {numbers[-1]}: gradients reduced"
        picture.text((first + last) / 2, y + 18, words, "middle", FAINT)
    picture.save()


def grid() -> None:
    recipe, a_node = "16xh100-3d", 8
    parallel = recipe_file.load(recipe).parallel
    picture = Picture("3d", 860, 344, f"The recipe {recipe}: position of each rank")
    cell, pitch, left, top = 66, 214, 40, 88
    wide = parallel.tensor * (cell + 4) - 4
    for rank in range(parallel.workers):
        at = place(rank, parallel)
        x, y = left + at.stage * pitch + at.tensor * (cell + 4), top + at.data * 96
        picture.box(x, y, cell, 56, WORKERS[at.stage], radius=6)
        picture.text(x + cell / 2, y + 25, f"rank {rank}", "middle", bold=True)
        picture.text(x + cell / 2, y + 44, f"tensor {at.tensor}", "middle", FAINT)
    for stage in range(parallel.pipeline):
        x = left + stage * pitch
        picture.text(x + wide / 2, top - 14, f"stage {stage}", "middle", bold=True)
        picture.line(x + wide / 2, top + 60, x + wide / 2, top + 92, "double")
        for data in range(parallel.data if stage else 0):
            picture.line(x - pitch + wide + 5, top + data * 96 + 28, x - 5, top + data * 96 + 28, "double")
    stages_a_node = parallel.pipeline * a_node // parallel.workers
    for node in range(parallel.workers // a_node):
        x = left + node * stages_a_node * pitch
        picture.text(x + ((stages_a_node - 1) * pitch + wide) / 2, 38, f"node {node}", "middle", size=15, bold=True)
        if node:
            picture.line(x - 38, 22, x - 38, top + 160, "dashed")
    notes = [
        "horizontal, within a stage: tensor parallelism; all-reduces in every layer of every micro-batch",
        "vertical: data parallelism; gradients and weights, once per step",
        "horizontal, between stages: activations and their gradients, once per micro-batch; nearly all traffic between nodes",
    ]
    for number, note in enumerate(notes):
        picture.text(22, top + 186 + number * 24, note)
    picture.save()


def table(sizes: list[tuple[int, int]]) -> None:
    """Prints the idle fractions quoted in layouts.md."""
    print("stages  micro-batches  1F1B idle  DualPipeV idle  peak on the first stage")
    for stages, micro_batches in sizes:
        one, two = (run_schedule(stages, micro_batches, dual) for dual in (False, True))
        peak = f"{in_flight(one[0])} stages, {in_flight(two[0])} half stages"
        print(f"{stages:6}  {micro_batches:13}  {idle(one, False):9.1%}  {idle(two, True):14.1%}  {peak}")


if __name__ == "__main__":
    zero()
    tensor()
    longest = max(rank.time for rank in run_schedule(4, 8, dual=False))
    timeline("pipeline-1f1b", dual=False, longest=longest)
    timeline("dualpipev", dual=True, longest=longest)
    sequence()
    expert()
    grid()
    table([(2, 4), (4, 8), (4, 32), (8, 32), (8, 128)])
