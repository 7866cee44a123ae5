"""Work of a rank or an engine by class: kernels of a GPU, or operators of a CPU, with their FLOPs, phase and layer. Needs no
torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from strata.platform.profile.trace import Event, Trace, walk

RESULT_FIRST = "_C::onednn_mm"  # vLLM's product on CPUs, whose first argument is the result
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", RESULT_FIRST)
# Classes by a part of an operator's name, the first that matches.
CLASSES = (
    ("kv_cache_update", "KV cache"),
    ("reshape_and_cache", "KV cache"),
    ("attention", "attention forward"),
    ("flash_fwd", "attention forward"),
    ("flashattn", "attention forward"),
    ("cross_entropy", "loss"),
    ("log_softmax", "loss"),
    ("nll_loss", "loss"),
    ("rms_norm", "norms"),
    ("rope", "rope"),
    ("rotary", "rope"),
    ("swiglu", "activation"),
    ("silu", "activation"),
    ("act_and_mul", "activation"),
    ("embedding", "embedding"),
    ("lora_projections", "matrix products"),
    ("adam", "optimizer"),
    ("nccl", "collectives"),
)
ATTENTION_PASSES = {"attention forward": 2.0, "attention backward": 5.0}  # products of [t, e] by [e, t] or as large


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel or an operator. `shape` is that of a matrix product or of attention."""

    begin: float
    end: float
    kind: str  # class, such as "matrix products"
    name: str
    shape: str
    dtype: str
    flops: float
    phase: str
    layer: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Places(Protocol):
    """Phase of a moment and layer of an event."""

    def phase(self, when: float) -> str: ...

    def layer(self, event: Event) -> str: ...


def works(trace: Trace, places: Places, begin: float, end: float) -> list[Work]:
    """All work that begins within a time, in time order."""
    found = [*_kernels(trace, places)] if trace.on_gpu else [*_operators(trace, places)]
    return sorted((work for work in found if begin <= work.begin < end), key=lambda work: work.begin)


def _kernels(trace: Trace, places: Places) -> Iterator[Work]:
    """A product may run several kernels, as split-K does: its FLOPs belong to the longest."""
    launched: list[tuple[Event, Event | None, Event | None]] = []
    longest: dict[int, Event] = {}
    for kernel in trace.device:
        launch = trace.launches.get(kernel.correlation) if kernel.correlation is not None else None
        op = _known_around(launch) if launch else None
        launched.append((kernel, launch, op))
        if op and (id(op) not in longest or longest[id(op)].seconds < kernel.seconds):
            longest[id(op)] = kernel
    for kernel, launch, op in launched:
        phase = places.phase(launch.begin if launch else kernel.begin)
        counted = op if op and longest[id(op)] is kernel else None
        kind = _kind_of_kernel(kernel, op, launch, phase)
        shape = _shape(op) if op else ""
        layer = places.layer(launch) if launch else ""
        yield Work(kernel.begin, kernel.end, kind, kernel.name, shape, _dtype(op), _flops(counted), phase, layer)


def _kind_of_kernel(kernel: Event, op: Event | None, launch: Event | None, phase: str) -> str:
    if kernel.kind != "kernel":
        return "memory copies"
    if "nccl" in kernel.name.lower():
        return "collectives"
    around = [] if launch is None else [kind for e in launch.ancestors() if (kind := kind_of(e.name))]
    if around:
        # A product inside the loss belongs to the loss.
        return around[-1] if around[-1] in ("loss", *ATTENTION_PASSES) else around[0]
    if found := kind_of(kernel.name):
        return found
    if phase == "optimizer":
        return "optimizer"
    name = kernel.name.lower()
    if any(word in name for word in ("gemm", "nvjet", "cutlass", "xmma")):
        return "matrix products"
    return "norms" if "rsqrt" in name else "other kernels"


@cache
def kind_of(name: str) -> str | None:
    """Class of an operator or a kernel by its name, None for one without."""
    if name in PRODUCTS:
        return "matrix products"
    lower = name.lower()
    if "attention" in lower and "backward" in lower:
        return "attention backward"
    return next((kind for part, kind in CLASSES if part in lower), None)


def _known_around(event: Event) -> Event | None:
    return next((e for e in event.ancestors() if e.kind == "cpu_op" and kind_of(e.name)), None)


def _operators(trace: Trace, places: Places) -> Iterator[Work]:
    for thread, roots in trace.roots.items():
        if thread == trace.main or any("autograd::engine" in e.name for e in roots):
            for event in roots:
                yield from _inside(event, places)


def _inside(event: Event, places: Places) -> Iterator[Work]:
    """Operators of a class, and other operators without such inside. Waiting is no work."""
    if event.name.startswith("c10d::"):
        return
    if event.kind == "cpu_op":
        kind = None if event.name.startswith("autograd::") else kind_of(event.name)
        if kind or not any(e.range or (e.kind == "cpu_op" and kind_of(e.name)) for e in walk(event.children)):
            phase, flops = places.phase(event.begin), sum(_flops(e) for e in walk([event]))
            kind = kind or ("optimizer" if phase == "optimizer" else "other operators")
            name = event.name.removeprefix("autograd::engine::evaluate_function: ")
            yield Work(event.begin, event.end, kind, name, _shape(event), _dtype(event), flops, phase, places.layer(event))
            return
    for child in event.children:
        yield from _inside(child, places)


def _flops(event: Event | None) -> float:
    """FLOPs by the shapes of the inputs; 0 for an operator that is neither a product nor attention. Causal attention sees half
    of the keys. Attention on the CPU and Strata's count their own products inside."""
    if event is None or event.kind != "cpu_op":
        return 0.0
    if sizes := _product(event):
        return 2.0 * _times(sizes)
    kind = kind_of(event.name)
    if kind in ATTENTION_PASSES and not any(_flops(e) for e in event.children) and (sizes := _attention(event)):
        return ATTENTION_PASSES[kind] * 2.0 * _times(sizes) / 2
    return 0.0


def _product(event: Event) -> tuple[int, ...] | None:
    """[batch,] m, n, k."""
    if event.name not in PRODUCTS:
        return None
    matrices = [
        dims for dims in event.dims if isinstance(dims, list) and len(dims) >= 2 and all(isinstance(d, int) for d in dims)
    ]
    if len(matrices) < 2:
        return None
    if event.name == RESULT_FIRST:
        return (*matrices[0], matrices[1][-1])
    left, right = matrices[-2:] if event.name in ("aten::addmm", "aten::baddbmm") else matrices[:2]
    return (*left[:-2], left[-2], right[-1], left[-1])


def _attention(event: Event) -> tuple[int, ...] | None:
    """Batch, heads, queries, keys, width. Strata's tensors have heads after tokens, torch's before. The shapes of attention over
    a paged KV cache do not have the lengths of its sequences."""
    if "paged" in event.name or not event.name.startswith(("strata::", "aten::")):
        return None
    tensors = [dims for dims in event.dims if isinstance(dims, list) and len(dims) == 4]
    if len(tensors) < 2:
        return None
    q, k = tensors[1:3] if "backward" in event.name else tensors[:2]
    if event.name.startswith("strata::"):
        return q[0], q[2], q[1], k[1], q[3]
    return q[0], q[1], q[2], k[2], q[3]


def _times(sizes: Sequence[int]) -> float:
    product = 1.0
    for size in sizes:
        product *= size
    return product


def _shape(event: Event) -> str:
    sizes = _product(event) or (_attention(event) if kind_of(event.name) in ATTENTION_PASSES else None)
    return " x ".join(map(str, sizes)) if sizes else ""


def _dtype(event: Event | None) -> str:
    return next((each for each in (event.types if event else ()) if each and each not in ("Scalar", "ScalarList")), "")
