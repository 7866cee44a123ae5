"""Flash attention and its gradients on a GPU against fp64, with the kernels selected for the shape and the portable ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from strata.kernels.compiler.ahead import compile_ahead
from strata.kernels.ops.flash_attention import portable, portable_backward
from strata.kernels.ops.flash_attention.flash_attention import flash_attention, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    t: int
    s: int
    b: int = 2
    h: int = 4
    kv: int = 2
    e: int = 128
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def cu_seqlens(self) -> Tensor | None:
        if self.documents is None:
            return None
        return torch.tensor([0, *self.documents], device="cuda").cumsum(0, dtype=torch.int32)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v, as slices of one projection if they have equal lengths, and dout."""
        if self.t == self.s:
            qkv = torch.randn(self.b, self.t, self.h + 2 * self.kv, self.e, device="cuda", dtype=self.dtype)
            q, k, v = torch.split(qkv, [self.h, self.kv, self.kv], dim=2)
        else:
            q = torch.randn(self.b, self.t, self.h, self.e, device="cuda", dtype=self.dtype)
            k, v = torch.randn(2, self.b, self.s, self.kv, self.e, device="cuda", dtype=self.dtype)
        return q, k, v, torch.randn(self.b, self.t, self.h, self.e, device="cuda", dtype=self.dtype)


SHAPES = [
    Shape(1, 1),
    Shape(3, 3),
    Shape(127, 127),
    Shape(129, 129, h=3, kv=3),
    Shape(4097, 4097, b=1, h=2, kv=1),
    Shape(1, 300),
    Shape(200, 1000, h=8, kv=1),
    Shape(300, 100),
    Shape(500, 500, dtype=torch.float16),
    Shape(333, 1000, causal=False),
    Shape(1000, 1000, window=200),
    Shape(1000, 1000, b=1, documents=(100, 0, 413, 1, 486)),
    Shape(1000, 1000, e=64),
    Shape(600, 600, e=64, causal=False),
    Shape(1000, 1000, b=1, e=64, documents=(999, 1), dtype=torch.float16),
    Shape(600, 600, e=256),
    Shape(600, 600, e=256, causal=False, window=100),
    Shape(600, 600, e=96),
    Shape(600, 600, h=3, kv=3, e=72, causal=False),  # TMA pads its second slice, with a neighbouring head behind its end
    Shape(600, 77, h=3, kv=3, e=72, causal=False),
    Shape(333, 333, e=80),
    Shape(333, 333, e=160),
    Shape(333, 333, e=40, causal=False),
    Shape(333, 333, e=136, causal=False, dtype=torch.float16),
    Shape(300, 300, e=64, dtype=torch.float32),
    Shape(300, 300, b=1, e=64, dtype=torch.float32, documents=(130, 170), window=64),
]

# Heads that Hopper's forward kernel splits into two slices, in all its modes.
SPLIT_SHAPES = [
    shape
    for e in (72, 80, 96, 160)
    for shape in (
        Shape(1, 1, e=e),
        Shape(331, 331, h=6, kv=2, e=e, dtype=torch.float16),
        Shape(200, 1001, h=8, kv=1, e=e),
        Shape(333, 1000, e=e, causal=False, dtype=torch.float16),
        Shape(333, 1, e=e, causal=False),
        Shape(1001, 1001, e=e, window=200),
        Shape(1000, 1000, b=1, e=e, documents=(100, 0, 413, 1, 486)),
        Shape(1000, 1000, b=1, e=e, documents=(129, 871), window=100, dtype=torch.float16),
        Shape(2100, 2100, h=8, kv=2, e=e),  # several tiles a program
        Shape(2100, 130, h=16, kv=16, e=e, causal=False),
    )
]


def by_op(shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    longest = max(shape.documents) if shape.documents else None
    options = {"cu_seqlens": shape.cu_seqlens(), "max_seqlen": longest}
    out = flash_attention(*inputs, causal=shape.causal, window=shape.window, **options)  # type: ignore[arg-type]
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def forward_by_op(shape: Shape, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    longest = max(shape.documents) if shape.documents else None
    return flash_attention(q, k, v, causal=shape.causal, window=shape.window, cu_seqlens=shape.cu_seqlens(), max_seqlen=longest)


def by_portable(shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    options = (shape.causal, shape.window, shape.e**-0.5, shape.cu_seqlens(), shape.t)
    out, lse = portable.forward(q, k, v, *options)
    return out, *portable_backward.backward(dout, q, k, v, out, lse, *options)


RUNS = [(by_op, shape) for shape in SHAPES] + [(by_portable, shape) for shape in SHAPES if shape.e == 128]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    runs: list[tuple[Callable[..., object], Shape]] = [*RUNS, *((forward_by_op, shape) for shape in SPLIT_SHAPES)]
    compile_ahead(partial(run, shape, *shape.inputs()) for run, shape in runs)


@pytest.mark.parametrize(("run", "shape"), RUNS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_equals_the_reference(run: Callable[..., tuple[Tensor, ...]], shape: Shape) -> None:
    inputs = shape.inputs()
    learned = [x.double().requires_grad_() for x in inputs[:3]]
    right = reference(*learned, causal=shape.causal, window=shape.window, cu_seqlens=shape.cu_seqlens())
    truth = (right.detach(), *torch.autograd.grad(right, learned, inputs[3].double()))
    del right
    poison = [torch.full_like(x, torch.nan) for _ in range(2) for x in truth]
    del poison  # unwritten outputs would contain NaN
    for name, got, expected in zip(("out", "dq", "dk", "dv"), run(shape, *inputs), truth, strict=True):
        off = float((got.double() - expected).norm()) / max(float(expected.norm()), 1.0)
        assert off <= TOLERANCE[shape.dtype], f"{name} is off by {off:.1e}"


@pytest.mark.parametrize("shape", SPLIT_SHAPES, ids=str)
def test_heads_of_two_slices_equal_the_reference(shape: Shape) -> None:
    inputs = shape.inputs()
    expected = reference(
        *(x.double() for x in inputs[:3]), causal=shape.causal, window=shape.window, cu_seqlens=shape.cu_seqlens()
    )
    poison = torch.full_like(inputs[0], torch.nan)
    del poison  # unwritten outputs would contain NaN
    got = forward_by_op(shape, *inputs).double()
    for columns in (slice(0, 64), slice(64, None)):  # an error in few columns would vanish in the norm of all
        off = float((got - expected)[..., columns].norm()) / max(float(expected[..., columns].norm()), 1.0)
        assert off <= TOLERANCE[shape.dtype], f"columns from {columns.start} on are off by {off:.1e}"


def test_input_strides() -> None:
    shape = Shape(200, 200, h=4, kv=4)
    q, k, v = (torch.randn(2, 4, 200, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    dout = torch.randn(2, 4, 128, 200, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2)
    contiguous = by_op(shape, *(x.contiguous() for x in (q, k, v, dout)))
    for got, expected in zip(by_op(shape, q, k, v, dout), contiguous, strict=True):
        assert (got - expected).float().norm() <= 1e-2 * expected.float().norm()


def test_empty() -> None:
    for shape in (Shape(4, 4, b=0), Shape(0, 4), Shape(4, 0)):
        q, k, v, dout = shape.inputs()
        out, *gradients = by_op(shape, q, k, v, dout)
        assert out.shape == q.shape and (out == 0).all()
        assert all(x.shape == y.shape and (x == 0).all() for x, y in zip(gradients, (q, k, v), strict=True))


def test_compiled_model_has_the_same_gradients() -> None:
    q, k, v, dout = Shape(127, 127).inputs()
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(lambda q, k, v: 2 * flash_attention(q, k, v), fullgraph=True)
    gradients = (torch.autograd.grad(run(*inputs), inputs, dout) for run in (compiled, lambda *x: 2 * flash_attention(*x)))
    for got, expected in zip(*gradients, strict=True):
        assert (got - expected).float().norm() <= 1e-2 * expected.float().norm()
    torch.library.opcheck(torch.ops.strata.flash_attention.default, (*inputs, True, None, 0.1, None, None))


def test_larger_head_dimensions_are_rejected() -> None:
    q, k, v, _ = Shape(4, 4, e=512).inputs()
    with pytest.raises(ValueError, match="head dimensions up to 256"):
        flash_attention(q, k, v)
