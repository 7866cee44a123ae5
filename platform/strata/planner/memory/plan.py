"""Memory of a GPU in training, stage by stage, and its peak.

    peak = state + activations + memory of the backward pass + communication buffers + allowances

State is parameters, gradients and Adam's moments, as in the ZeRO paper (arXiv 1910.02054, section 3): in mixed precision
2 + 2 + 12 bytes per parameter, in fp32 4 + 4 + 8. `peak_bytes` evaluates the same formulas without a worksheet, for searches
over thousands of layouts.
"""

from dataclasses import dataclass
from functools import lru_cache

from strata.planner.catalogue.shape import Shape
from strata.planner.layout import Layout, Recompute, Schedule, TrainingPrecision
from strata.planner.memory.activations import Keeping, write_layer, write_tokens
from strata.planner.memory.buffers import write_allowances, write_buffers
from strata.planner.memory.state import write_own, write_parameters, write_state
from strata.planner.pipeline import schedules
from strata.planner.step.stages import layers_of, parts_of
from strata.planner.units import show
from strata.planner.worksheet import Worksheet, evaluate

LOGITS_CHUNK = {"gpu": 1 << 29, "cpu": 1 << 24}  # linear_cross_entropy's
CHUNKS_ADDED_UP = 8
TERMS = ("parameters", "gradients", "optimizer", "activations", "logits", "working", "buffers", "gaps", "runtime")


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes on one GPU of a stage. `host` is the host memory for this GPU."""

    stage: int
    layers: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    working: float  # a layer's gradients, and its activations where it is computed again, beyond what the logits leave
    buffers: float
    gaps: float
    runtime: float
    host: float

    @property
    def terms(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in TERMS}

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def largest(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


@dataclass(frozen=True)
class MemoryPlan:
    stages: tuple[StageMemory, ...]
    capacity: float

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def peak(self) -> float:
        return self.fullest.total

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity

    @property
    def where(self) -> str:
        """Stage with the highest peak, and its largest term."""
        return f"stage {self.fullest.stage}, {self.fullest.largest}"


def no_fit_note(held: MemoryPlan) -> str:
    """A note that a run does not fit by plan, for reports of measured runs; empty if it fits."""
    return "" if held.fits else f"does not fit by plan: {show(held.peak, 'B')} of {show(held.capacity, 'B')}"


def plan_memory(
    shape: Shape, layout: Layout, gpu_memory: float, keeping: Keeping, worksheet: Worksheet, sequence: int | None = None
) -> MemoryPlan:
    """Memory of every stage, with a worksheet part per kind. Stages of a kind differ only in micro-batches in flight."""
    _write_model(worksheet, shape, layout, keeping, shape.context if sequence is None else sequence)
    explained = {stage.number for stage in _fullest(*_cut(shape, layout))} | {layout.pipeline - 1}
    stages = []
    for stage in _stages(*_cut(shape, layout)):
        part = worksheet.part(f"stage {stage.number}") if stage.number in explained else _Quick(worksheet)
        _write_stage(part, stage, shape, layout, keeping)
        stages.append(_read(part, stage))
    worksheet.given("capacity", gpu_memory, "B", "of one GPU")
    plan = MemoryPlan(tuple(stages), gpu_memory)
    worksheet.given("peak", plan.peak, "B", plan.where)
    return plan


def peak_bytes(shape: Shape, layout: Layout, keeping: Keeping, sequence: int | None = None) -> float:
    """Same value as `plan_memory(...).peak`, in about 30 µs."""
    outer = _model(
        shape,
        keeping,
        shape.context if sequence is None else sequence,
        layout.tensor,
        layout.sequence,
        layout.context,
        layout.expert,
        layout.micro_batch,
        layout.recompute,
        layout.sequence_parallel,
        layout.precision,
    )
    most = 0.0
    for stage in _fullest(*_cut(shape, layout)):
        quick = _Quick(outer)
        _write_stage(quick, stage, shape, layout, keeping)
        most = max(most, quick["total"])
    return most


class _Quick(Worksheet):
    """Worksheet that stores no lines, for a search."""

    def __init__(self, outer: Worksheet | None = None) -> None:
        self._values = dict(outer._values) if outer else {}

    def given(self, name: str, value: float, unit: str = "", why: str = "") -> float:
        self._values[name] = value
        return value

    def work_out(self, name: str, formula: str, unit: str = "", why: str = "") -> float:
        value = evaluate(formula, self._values)
        self._values[name] = value
        return value


@lru_cache(maxsize=4096)
def _model(
    shape: Shape,
    keeping: Keeping,
    sequence: int,
    tensor: int,
    ulysses: int,
    ring: int,
    expert: int,
    micro_batch: int,
    recompute: Recompute,
    sequence_parallel: bool,
    precision: TrainingPrecision,
) -> Worksheet:
    """Lines that do not depend on the rest of a layout, cached for all layouts that share them."""
    layout = Layout(
        tensor=tensor,
        sequence=ulysses,
        context=ring,
        expert=expert,
        micro_batch=micro_batch,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        precision=precision,
    )
    quick = _Quick()
    _write_model(quick, shape, layout, keeping, sequence)
    return quick


@dataclass(frozen=True)
class Stage:
    """The part of the model that a stage holds."""

    number: int
    dense: int
    sparse: int
    embedding: bool
    head: bool

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, count in (("dense", self.dense), ("sparse", self.sparse)) if count]


@lru_cache(maxsize=4096)
def _stages(shape: Shape, pipeline: int, schedule: Schedule, interleave: int) -> tuple[Stage, ...]:
    counts = layers_of(shape, parts_of(Layout(pipeline=pipeline, schedule=schedule, interleave=interleave)))
    stages = []
    for number in range(pipeline):
        parts = schedules.parts_of(schedule, pipeline, interleave, number) if pipeline > 1 else range(len(counts))
        dense, sparse = (sum(counts[part][kind] for part in parts) for kind in (0, 1))
        stages.append(Stage(number, dense, sparse, 0 in parts, len(counts) - 1 in parts))
    return tuple(stages)


@lru_cache(maxsize=4096)
def _fullest(shape: Shape, pipeline: int, schedule: Schedule, interleave: int) -> tuple[Stage, ...]:
    """Stages that can have the highest peak.

    Drops stages that hold no more of anything than an earlier stage, which has at least as many micro-batches in flight. With
    zbv and few micro-batches later stages have more in flight; there the comparison is with a later stage.
    """
    stages = _stages(shape, pipeline, schedule, interleave)
    found: list[Stage] = []
    for stage in reversed(stages) if schedule == "zbv" else stages:
        if not any(_covers(other, stage) for other in found):
            found.append(stage)
    return tuple(found)


def _covers(one: Stage, other: Stage) -> bool:
    return one.dense >= other.dense and one.sparse >= other.sparse and one.embedding >= other.embedding and one.head >= other.head


def _cut(shape: Shape, layout: Layout) -> tuple[Shape, int, Schedule, int]:
    return shape, layout.pipeline, layout.schedule, layout.interleave


def _write_model(worksheet: Worksheet, shape: Shape, layout: Layout, keeping: Keeping, sequence: int) -> None:
    """A layer's activations, and its parameters on one GPU."""
    write_tokens(worksheet, shape, layout, sequence)
    if shape.dense_layers:
        write_layer(worksheet, shape, layout, keeping, sparse=False)
    if shape.experts:
        write_layer(worksheet, shape, layout, keeping, sparse=True)
    write_parameters(worksheet, shape, layout, keeping)
    _write_busy(worksheet, shape, layout, keeping)
    worksheet.given("vocab", shape.vocab)


def _write_busy(worksheet: Worksheet, shape: Shape, layout: Layout, keeping: Keeping) -> None:
    """Memory of a layer's backward pass beside the saved activations: gradients of the residual stream and, in a
    feed-forward block, of the product, the activated gate and the up projection together (of a GeLU's output and input)."""
    adapters = keeping.tuning.adapters if keeping.tuning else None
    wide = 3 if shape.gated else 2
    kinds = {"dense": f"tokens * (hidden + {wide} * ffn / tensor) * width"} if shape.dense_layers else {}
    if shape.experts:
        kinds["sparse"] = f"dispatched * (hidden + {wide} * expert_ffn / tensor) * width"
    for kind, formula in kinds.items():
        again = f" + max(0, {kind}_whole - {kind}_layer)" if layout.recompute != "none" else ""
        again += f" + {kind}_adapter_saved" if adapters and layout.recompute == "full" else ""
        again += " + dequantized" if adapters and adapters.nf4 else ""
        worksheet.work_out(f"{kind}_busy", formula + again, "B", "beside saved activations, in a layer's backward pass")


def _write_stage(worksheet: Worksheet, stage: Stage, shape: Shape, layout: Layout, keeping: Keeping) -> None:
    write_own(worksheet, shape, stage.dense, stage.sparse, stage.embedding, stage.head, keeping)
    write_state(worksheet, layout, keeping)
    _write_in_flight(worksheet, stage, layout)
    _write_activations(worksheet, stage, layout, keeping)
    write_buffers(worksheet, shape, layout, keeping, stage.kinds, stage.embedding or stage.head)
    write_allowances(worksheet, layout, keeping)
    worksheet.work_out("total", " + ".join(TERMS), "B", "at the fullest moment")


def _write_in_flight(worksheet: Worksheet, stage: Stage, layout: Layout) -> None:
    if layout.pipeline == 1:
        worksheet.given("in_flight", 1, "", "micro-batches whose activations are held")
        return
    worksheet.given("stage", stage.number)
    worksheet.given("pipeline", layout.pipeline, "", "stages")
    worksheet.given("interleave", layout.interleave, "", "chunks of the model that a stage holds")
    worksheet.given("micro_batches", max(1, layout.micro_batches))
    worksheet.work_out(
        "in_flight", schedules.IN_FLIGHT[layout.schedule], "", f"micro-batches whose activations a stage holds: {layout.schedule}"
    )


def _write_activations(worksheet: Worksheet, stage: Stage, layout: Layout, keeping: Keeping) -> None:
    """Activations and logits. All layers' activations are in memory during the loss and the last layer's backward pass."""
    held = [f"{kind}_layers * {kind}_layer" for kind in stage.kinds]
    if keeping.tuning and keeping.tuning.adapters and layout.recompute != "full":
        held += [f"{kind}_layers * {kind}_adapter_saved" for kind in stage.kinds]
    if stage.embedding and keeping.style == "unfused":
        held.append("between * hidden")  # a mask of the embedding's dropout
    if stage.head:
        # Where the loss computes its gradients in the forward pass, that of the head's input is stored in its input's place.
        ends = {"eager": "between * (hidden * (4 + 2 * width) + 4)", "own": "between * (2 * hidden * width + 4)"}
        held.append(ends.get(keeping.saving, "2 * between * hidden * width"))
    worksheet.work_out(
        "once", " + ".join(held) or "0", "B", "saved of one micro-batch, with the last norm's and the head's inputs"
    )
    worksheet.work_out("activations", "in_flight * once", "B", "of all micro-batches in flight")
    _write_logits(worksheet, stage, layout, keeping)
    busy = [f"{kind}_busy" for kind in stage.kinds]
    worksheet.work_out("busy", f"max({', '.join(busy)})" if len(busy) > 1 else busy[0] if busy else "0", "B")
    worksheet.work_out("working", "max(0, busy - logits)", "B", "the backward pass of a layer comes after that of the loss")


def _write_logits(worksheet: Worksheet, stage: Stage, layout: Layout, keeping: Keeping) -> None:
    if not stage.head:
        worksheet.given("logits", 0.0, "B")
        return
    trains = keeping.tuning is None or keeping.tuning.head > 0
    columns = "vocab" if keeping.engine == "deepspeed" else "vocab / tensor"
    gpipe = f"(in_flight - 1) * 4 * tokens * {columns} + " if layout.schedule == "gpipe" else ""
    if keeping.engine == "megatron":
        worksheet.work_out("logits", f"{gpipe}tokens * {columns} * (4 + width)", "B", "as they come, and their softmax in fp32")
        return
    if keeping.style == "own":
        worksheet.given("chunk", LOGITS_CHUNK["cpu" if keeping.cpu else "gpu"], "B", "of logits that are in memory at a time")
        # Too many chunks' gradients are added up in fp32.
        chunks = worksheet["tokens"] * worksheet["vocab"] * worksheet["width"] / worksheet["chunk"]
        summed = " + 4 * head_parameters" if chunks > CHUNKS_ADDED_UP and worksheet["width"] < 4 else ""
        gradient = f" + head_parameters * width{summed}" if trains else ""
        why = "some tokens' logits, and the head's own gradient" if trains else "some tokens' logits"
        worksheet.work_out("logits", f"min(chunk, tokens * vocab * width){gradient}", "B", why)
        return
    # Of torch's cross entropy in its backward pass: log-probabilities, their gradient and the logits' gradient, all in fp32. And
    # the gradient of the head's matrix, before it is added to what is there. DeepSpeed's pipeline keeps the logits, too.
    extra = " + tokens * vocab * width" if keeping.engine == "deepspeed" and layout.pipeline > 1 else ""
    why = "log-probabilities and two gradients in fp32" + ", and the head's own gradient" * trains
    gradient = " + head_parameters * width" if trains else ""
    worksheet.work_out("logits", f"{gpipe}3 * 4 * tokens * {columns}{gradient}{extra}", "B", why)


def _read(worksheet: Worksheet, stage: Stage) -> StageMemory:
    return StageMemory(stage.number, stage.dense + stage.sparse, **{name: worksheet[name] for name in (*TERMS, "host")})
