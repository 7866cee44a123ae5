"""Pipeline schedules: the order of operations of each stage, and the parts of the model it holds.

The model is divided along its depth into stages x interleave parts. A stage holds `interleave` of them, its chunks (`parts_of`).

gpipe        Huang et al. 2018: all forwards, then all backwards.
1f1b         Narayanan et al. 2019 (PipeDream-Flush): the fewest forwards ahead that keep the last stage busy.
interleaved  Narayanan et al. 2021, arXiv 2104.04473: 1f1b over several chunks per stage, `stages` micro-batches at a time.
zb-h1        Qi et al. 2023, arXiv 2401.10241: 1f1b with weight gradients deferred to idle time.
zbv          The same paper, section 6, with the order that is free of gaps when F, B and W take equally long; a scheduler
             that looks at the times (arXiv 2405.15362) can do better when they do not.
dualpipe     DeepSeek-V3, arXiv 2412.19437, in the order of its published code: each part lives on two stages, and half of
             the micro-batches enter at either end.
dualpipev    Its V-shaped half, from the same code: the second direction is the second half of the model.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from strata.planner.layout import Schedule
from strata.planner.worksheet import evaluate
from strata.platform.errors import UserError

Kind = Literal["F", "B", "W", "BW"]

CHUNKS: dict[Schedule, int] = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zbv": 2, "dualpipe": 1, "dualpipev": 2}


class Operation(NamedTuple):
    """Operation of a stage: B is the gradient of a chunk's input, W of its weights, BW of both.

    A tuple instead of a dataclass, since an order has up to a million of them.
    """

    kind: Kind
    micro_batch: int
    chunk: int  # of the stage; dualpipe: 0 on the way from stage 0, 1 on the way from the last stage
    joined: bool = False  # one block with its neighbour, F and then BW, each of which hides the other's communication


Order = tuple[Operation, ...]


def refusal(schedule: Schedule, stages: int, micro_batches: int, interleave: int) -> UserError | None:
    """The error for a schedule that cannot have this size, with the nearest size that works; None when it can."""
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("interleave", interleave)):
        if value < 1:
            return UserError(f"{name}={value} is less than 1", f"{name}=1 works")
    if schedule == "interleaved" and interleave < 2:
        return UserError(f"interleave={interleave} leaves nothing to interleave", "interleave=2 works, as does schedule 1f1b")
    if schedule != "interleaved" and interleave != CHUNKS[schedule]:
        chunks = CHUNKS[schedule]
        return UserError(f"schedule {schedule} cannot have interleave={interleave}", f"interleave={chunks} works")
    if schedule == "interleaved" and micro_batches % stages:
        nearest = max(1, round(micro_batches / stages)) * stages
        cause = f"schedule interleaved needs a multiple of stages={stages} micro-batches, not micro_batches={micro_batches}"
        return UserError(cause, f"micro_batches={nearest} works")
    if schedule == "dualpipe" and stages % 2:
        return UserError(f"schedule dualpipe needs an even number of stages, not stages={stages}", f"stages={stages + 1} works")
    if schedule in ("dualpipe", "dualpipev") and micro_batches < 2 * stages:
        cause = f"schedule {schedule} needs two micro-batches for each of stages={stages}, not micro_batches={micro_batches}"
        return UserError(cause, f"micro_batches={2 * stages} works")
    if schedule == "dualpipe" and micro_batches % 2:
        cause = f"schedule dualpipe needs as many micro-batches from either end, not micro_batches={micro_batches}"
        return UserError(cause, f"micro_batches={micro_batches + 1} works")
    return None


def check(schedule: Schedule, stages: int, micro_batches: int, interleave: int) -> None:
    error = refusal(schedule, stages, micro_batches, interleave)
    if error:
        raise error


def parts_of(schedule: Schedule, stages: int, interleave: int, stage: int) -> tuple[int, ...]:
    """The parts of the model, counted from its input, that a stage holds: one a chunk. On dualpipe, two for one."""
    if schedule == "dualpipe":
        return stage, stages - 1 - stage
    if schedule in ("zbv", "dualpipev"):
        return stage, 2 * stages - 1 - stage
    return tuple(range(stage, stages * interleave, stages))


def stage_of(schedule: Schedule, stages: int, part: int, chunk: int) -> int:
    """The stage that holds a part; on dualpipe, for micro-batches that go in the direction `chunk`."""
    if schedule == "dualpipe":
        return stages - 1 - part if chunk else part
    if schedule in ("zbv", "dualpipev"):
        return min(part, 2 * stages - 1 - part)
    return part % stages


@lru_cache(maxsize=128)
def orders(schedule: Schedule, stages: int, micro_batches: int, interleave: int) -> tuple[Order, ...]:
    """Operations of each stage, first to last, without times: a stage starts the next operation once its input is there."""
    check(schedule, stages, micro_batches, interleave)
    match schedule:
        case "gpipe":
            return (_gpipe(micro_batches),) * stages
        case "1f1b":
            return _one_forward_one_backward(stages, micro_batches)
        case "interleaved":
            return _interleaved(stages, micro_batches, interleave)
        case "zb-h1":
            return _zb_h1(stages, micro_batches)
        case "zbv":
            return tuple(_zbv(stages, micro_batches, stage) for stage in range(stages))
        case "dualpipe":
            half, each = stages // 2, micro_batches // 2
            upper = tuple(_dualpipe(half, each, depth, _Writer((0, each)), near=0) for depth in range(half))
            return upper + tuple(_dualpipe(half, each, depth, _Writer((0, each)), near=1) for depth in reversed(range(half)))
        case "dualpipev":
            return tuple(_dualpipe(stages, micro_batches, stage, _Writer(), near=0) for stage in range(stages))


# Micro-batches whose activations a stage holds at most, as a formula of a plan's worksheet. 1 is one micro-batch in all layers of
# the stage. Activations are held until the weight gradient is done: by the zero-bubble paper's count, W still needs 32 of the 34
# bytes that a layer keeps of each token and hidden unit (attention scores apart, which current kernels do not keep).
IN_FLIGHT: dict[Schedule, str] = {
    "gpipe": "micro_batches",
    "1f1b": "min(micro_batches, pipeline - stage)",
    # Megatron's order goes chunk by chunk, and the first stage is (interleave - 1) x pipeline + 2 (pipeline - 1) ahead.
    "interleaved": "min(micro_batches * interleave, pipeline * interleave + pipeline - 2 * stage - 1) / interleave",
    # Weight gradients wait, and their inputs with them: on all stages as on the first (arXiv 2401.10241).
    "zb-h1": "min(micro_batches, pipeline)",
    "zbv": "min(micro_batches, pipeline, (micro_batches + stage + 1) / 2)",
    "dualpipev": "min(micro_batches, pipeline + 1 / 2)",
    # A stage holds two parts of the model, and pipeline + 1 micro-batches of one or the other.
    "dualpipe": "min(micro_batches, pipeline + 1) / 2",
}


@lru_cache(maxsize=2**16)
def in_flight(schedule: Schedule, stages: int, micro_batches: int, interleave: int, stage: int = 0) -> float:
    """Peak number of micro-batches whose activations a stage holds."""
    sizes: dict[str, float] = {"micro_batches": micro_batches, "pipeline": stages, "interleave": interleave, "stage": stage}
    return evaluate(IN_FLIGHT[schedule], sizes)


def _gpipe(micro_batches: int) -> Order:
    forwards = tuple(Operation("F", i, 0) for i in range(micro_batches))
    return forwards + tuple(Operation("BW", i, 0) for i in range(micro_batches))


def _one_forward_one_backward(stages: int, micro_batches: int) -> tuple[Order, ...]:
    forwards = [Operation("F", i, 0) for i in range(micro_batches)]
    backwards = [Operation("BW", i, 0) for i in range(micro_batches)]
    return tuple(_alternate(forwards, backwards, stages - 1 - stage) for stage in range(stages))


def _interleaved(stages: int, micro_batches: int, chunks: int) -> tuple[Order, ...]:
    """Interleaved 1F1B. Stages follow the same path through chunks and micro-batches and differ in their forwards ahead."""
    groups = range(0, micro_batches, stages)
    passes = [(group + i, chunk) for group in groups for chunk in range(chunks) for i in range(stages)]
    forwards = [Operation("F", i, chunk) for i, chunk in passes]
    backwards = [Operation("BW", i, chunks - 1 - chunk) for i, chunk in passes]
    ahead = (chunks - 1) * stages
    return tuple(_alternate(forwards, backwards, ahead + 2 * (stages - 1 - stage)) for stage in range(stages))


def _alternate(forwards: list[Operation], backwards: list[Operation], ahead: int) -> Order:
    both = len(forwards) - min(ahead, len(forwards))
    steady = [operation for pair in zip(forwards[ahead:], backwards, strict=False) for operation in pair]
    return (*forwards[:ahead], *steady, *backwards[both:])


def _zb_h1(stages: int, micro_batches: int) -> tuple[Order, ...]:
    """ZB-H1. Stage s defers weight gradients by s micro-batches, so all stages hold as much as the first."""
    forwards, backwards, weights = ([Operation(kind, i, 0) for i in range(micro_batches)] for kind in _SPLIT)
    result = []
    for stage in range(stages):
        ahead = stages - 1 - stage
        order = forwards[:ahead]
        for i in range(micro_batches):
            order += forwards[ahead + i : ahead + i + 1]
            order.append(backwards[i])
            if i >= stage:
                order.append(weights[i - stage])
        result.append((*order, *weights[max(0, micro_batches - stage) :]))
    return tuple(result)


_SPLIT: tuple[Kind, Kind, Kind] = ("F", "B", "W")


class _Writer:
    """Writes an order of two chunks, whose micro-batches it counts from `first` on."""

    def __init__(self, first: tuple[int, int] = (0, 0)) -> None:
        self.order: list[Operation] = []
        self._forward = list(first)
        self._backward = list(first)
        self._waiting: list[tuple[int, int]] = []  # micro-batch and chunk of B without W

    def forward(self, chunk: int, joined: bool = False) -> None:
        self.order.append(Operation("F", self._forward[chunk], chunk, joined))
        self._forward[chunk] += 1

    def backward(self, chunk: int) -> None:
        """Gradient of the inputs alone."""
        self._waiting.append((self._backward[chunk], chunk))
        self.order.append(Operation("B", self._backward[chunk], chunk))
        self._backward[chunk] += 1

    def weight(self, chunk: int | None = None) -> None:
        """Oldest pending weight gradient of one chunk or of both."""
        oldest = next(one for one in self._waiting if chunk in (None, one[1]))
        self._waiting.remove(oldest)
        self.order.append(Operation("W", *oldest))

    def whole_backward(self, chunk: int, joined: bool = False) -> None:
        self.order.append(Operation("BW", self._backward[chunk], chunk, joined))
        self._backward[chunk] += 1

    def pair(self, forward: int, backward: int) -> None:
        self.forward(forward, joined=True)
        self.whole_backward(backward, joined=True)


def _zbv(stages: int, micro_batches: int, stage: int) -> Order:
    """The order for at least 2 x stages - 1 micro-batches, without the operations of micro-batches that do not exist."""
    enough = max(micro_batches, 2 * stages - 1)
    write = _Writer()
    for _ in range(2 * (stages - stage) - 1):
        write.forward(0)
    for _ in range(stage):
        write.forward(1)
        write.forward(0)
    for _ in range(stages - stage):
        write.forward(1)
        write.backward(1)
        write.weight()
    for _ in range(enough - stages):
        write.forward(0)
        write.backward(0)
        write.weight()
        write.forward(1)
        write.backward(1)
        write.weight()
    for _ in range(stage):
        write.backward(0)
        write.backward(1)
    for _ in range(stages - stage):
        write.backward(0)
        write.weight(0)
    for chunk in [1] * stage + [0] * stage:
        write.weight(chunk)
    return tuple(operation for operation in write.order if operation.micro_batch < micro_batches)


def _dualpipe(half: int, each: int, depth: int, write: _Writer, near: int) -> Order:
    """Order of a stage that is `depth` away from its end of a pipeline whose middle is `half` away, with `each` micro-batches a
    direction. `near` is the direction (or, in a V, the chunk) whose input is at this end."""
    far = 1 - near
    to_middle = half - 1 - depth
    for _ in range(2 * to_middle):
        write.forward(near)
    for _ in range(depth + 1):
        write.forward(near)
        write.forward(far)
    for _ in range(to_middle):
        write.backward(far)
        write.weight()
        write.forward(far)
    for i in range(each - 2 * half + depth + 1):
        if i == 0 and to_middle == 0:  # not as a pair: its forward need not wait for the first gradient
            write.forward(near)
            write.whole_backward(far)
        else:
            write.pair(near, far)
        write.pair(far, near)
    for _ in range(to_middle):
        write.whole_backward(far)
        write.pair(far, near)
    ending = [far, near] * (depth + 1)
    for chunk in ending[: depth + 1]:
        write.whole_backward(chunk)
    for chunk in ending[depth + 1 :]:
        write.backward(chunk)
    for _ in range(to_middle):
        write.weight()
        write.backward(near)
    for _ in range(depth + 1):
        write.weight()
    return tuple(write.order)
