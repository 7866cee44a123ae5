"""Time of each step of a rank, by cause. The causes of one step add up to it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from strata.platform.profile import intervals
from strata.platform.profile.trace import Event, Trace, walk
from strata.platform.profile.work import ATTENTION_PASSES, Work, kind_of
from strata.training.profile.analysis.phases import works

RARE = ("evaluation", "checkpoint")  # not in every step
WHOLE = ("data", *RARE)  # ranges whose inside does not matter
COMMUNICATION = ("collective ", "wait ", "submit ")
TRANSFERS = ("send ", "recv ")
READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap")
DISPATCH_S = 5e-6  # of an operator on a CPU: checks, allocation of the result, a view

LEAST_TOKENS = 64  # of scores: a square tensor below may be anything
WORKING = ("products", "attention", "scores", "loss", "optimizer", "other work", "recomputation")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective, or a transfer between two ranks, as the training loop sees it."""

    name: str  # such as "all_reduce 0+1 4096 B"
    seconds: float

    @property
    def between_two(self) -> bool:
        return self.name.startswith(TRANSFERS)


@dataclass
class Step:
    """Seconds by cause, without those of exchanges."""

    number: int
    begin: float
    end: float
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def own(self) -> float:
        """Time of this rank without waiting for others."""
        return sum(self.seconds.values())


def account(trace: Trace, found: Sequence[Work] | None = None) -> list[Step]:
    if trace.on_gpu:
        return _on_gpu(trace, works(trace) if found is None else found)
    return [_on_cpu(event) for event in trace.steps()]


def _number(event: Event) -> int:
    return int((event.range or "step 0").split()[1])


def _on_cpu(root: Event) -> Step:
    step = Step(_number(root), root.begin, root.end)
    known = {id(e) for e in walk([root]) if e.kind == "cpu_op" and _is_known(e)}
    holders = {id(around) for e in walk([root]) if id(e) in known or e.range for around in e.ancestors() if around is not e}
    _spend(root, "between phases", step, known, holders)
    return step


def _is_known(event: Event) -> bool:
    return not event.name.startswith("autograd::") and kind_of(event.name) is not None


def _spend(event: Event, cause: str, step: Step, known: set[int], holders: set[int]) -> None:
    """Adds the time of an event: its own to a cause, the rest to those of the events inside it."""
    name = event.range
    if name and name.startswith(COMMUNICATION):
        step.exchanges.append(Exchange(name.split(" ", 1)[1], event.seconds))
        return
    if name in WHOLE:
        step.seconds[name] += event.seconds
        return
    if name and name.startswith("gc "):
        step.seconds["garbage collection"] += event.seconds
        return
    if name == "reduction":
        cause = "gradient reduction"
    elif name in ("forward", "backward", "optimizer"):
        cause = "dispatch"
    elif name is None and event.kind == "cpu_op" and cause in ("dispatch", "between phases"):
        if id(event) in known or id(event) not in holders:
            cause = _cause(event)
            dispatch = min(DISPATCH_S, event.seconds)
            step.seconds["dispatch"] += dispatch
            step.seconds[cause] -= dispatch
        else:
            cause = "dispatch"
    inside = sum(child.seconds for child in event.children)
    step.seconds[cause] += event.seconds - inside
    reads = _reads(event.children) if cause in ("dispatch", "between phases") else set()
    for child in event.children:
        _spend(child, "host reads" if id(child) in reads else cause, step, known, holders)


def _reads(children: Sequence[Event]) -> set[int]:
    """Operators that read a value on the host, and those before them that only compute it. These make no autograd node, so the
    number of the next node does not grow."""
    found: set[int] = set()
    for at, child in enumerate(children):
        if child.name in READS:
            before = at
            while before >= 0 and children[before].kind == "cpu_op" and children[before].sequence == child.sequence:
                found.add(id(children[before]))
                before -= 1
    return found


def _cause(event: Event) -> str:
    """Cause of an operator's time by its class."""
    if is_recomputed(event):
        return "recomputation"
    kind = kind_of(event.name)
    if kind == "matrix products":
        return "products"
    if kind in ATTENTION_PASSES:
        return "scores" if any(_has_scores(e) for e in walk([event])) else "attention"
    if kind in ("loss", "optimizer"):
        return kind
    if any(e.range == "optimizer" for e in event.ancestors()):
        return "optimizer"
    return "scores" if _has_scores(event) else "other work"


def _has_scores(event: Event) -> bool:
    """True for an operator on attention's scores, [batch, heads, tokens, tokens], which fused attention never stores."""
    return any(isinstance(dims, list) and len(dims) >= 4 and dims[-1] == dims[-2] >= LEAST_TOKENS for dims in event.dims)


def is_recomputed(event: Event) -> bool:
    """True for an operator of a forward pass that runs again during a backward pass: only there does it make autograd nodes."""
    if not event.sequence or "Backward" in event.name:
        return False
    return any(e.name.startswith("autograd::engine::evaluate_function") for e in event.ancestors())


def _on_gpu(trace: Trace, found: Sequence[Work]) -> list[Step]:
    return [_gpu_step(trace, root, found) for root in trace.steps()]


def _gpu_step(trace: Trace, root: Event, found: Sequence[Work]) -> Step:
    """Kernels by class; idle time by what the host does meanwhile."""
    step = Step(_number(root), root.begin, root.end)
    mine = [work for work in found if root.begin <= work.begin < root.end and work.phase not in RARE]
    talk = [work for work in mine if work.kind == "collectives"]
    whole = {name: intervals.union((e.begin, e.end) for e in walk([root]) if e.range == name) for name in WHOLE}
    covered = intervals.union(each for name in RARE for each in whole[name])
    for name in RARE:
        step.seconds[name] += intervals.total(whole[name])
    until = root.begin
    for work in (each for each in mine if each.kind != "collectives"):
        step.seconds[_gpu_cause(work)] += max(0.0, work.end - max(work.begin, until))  # streams run side by side
        until = max(until, work.end)
    busy = intervals.union((*covered, *((work.begin, work.end) for work in mine if work.kind != "collectives")))
    for work in talk:
        step.exchanges.append(Exchange(work.name, intervals.total(intervals.difference([(work.begin, work.end)], busy))))
    idle = intervals.difference([(root.begin, root.end)], intervals.union((*busy, *((w.begin, w.end) for w in talk))))
    for cause, part in _idle_causes(trace, root, whole["data"], idle):
        step.seconds[cause] += intervals.total(part)
    return step


def _gpu_cause(work: Work) -> str:
    if work.kind == "matrix products":
        return "products"
    if work.kind in ATTENTION_PASSES:
        return "attention"
    return work.kind if work.kind in ("loss", "optimizer") else "other work"


def _idle_causes(
    trace: Trace, root: Event, data: list[intervals.Interval], idle: list[intervals.Interval]
) -> Iterator[tuple[str, list[intervals.Interval]]]:
    host = [e for roots in trace.roots.values() for e in walk(roots) if root.begin <= e.begin < root.end]
    reading = [(e.begin, e.end) for e in host if e.name.startswith(WAITS)]
    drained = [gap for gap in idle if any(begin < gap[0] and end <= gap[1] and end > gap[0] for begin, end in reading)]
    causes = (
        ("garbage collection", intervals.union((e.begin, e.end) for e in host if (e.range or "").startswith("gc "))),
        ("allocation", intervals.union((e.begin, e.end) for e in host if e.name.startswith(ALLOCATIONS))),
        ("data", data),
        ("host reads", intervals.union(drained)),
    )
    for cause, when in causes:
        yield cause, intervals.intersection(idle, when)
        idle = intervals.difference(idle, when)
    yield "dispatch", idle
