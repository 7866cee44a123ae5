"""Flash attention against a plain softmax: torch's kernel on the CPU, the interpreted Triton kernels, and invalid arguments."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.ops.flash_attention import portable
from strata.kernels.ops.flash_attention.flash_attention import flash_attention, reference
from strata.kernels.ops.flash_attention.portable_backward import backward

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the compiled kernels")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    t: int
    s: int
    b: int = 1
    h: int = 2
    kv: int = 1
    e: int = 16
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def cu_seqlens(self) -> Tensor | None:
        lengths = self.documents
        return None if lengths is None else torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        shapes = [(self.t, self.h), (self.s, self.kv), (self.s, self.kv), (self.t, self.h)]
        return [torch.randn(self.b, tokens, heads, self.e).to(dtype) for tokens, heads in shapes]


CAUSAL = [Shape(1, 1), Shape(3, 3, b=2, h=4, kv=2), Shape(129, 129, h=1), Shape(1, 127), Shape(33, 70), Shape(70, 33, h=1)]
OTHERS = [
    Shape(127, 40, causal=False, h=1),
    Shape(40, 70, causal=False, e=24, h=1),  # neither a tile's width nor a multiple of 16
    Shape(40, 33, causal=False, e=136, h=1),  # dk and dv in two launches
    Shape(100, 100, window=1, h=1),
    Shape(70, 129, window=40, h=1),
    Shape(70, 70, window=7, causal=False, h=1),
    Shape(60, 33, window=20, causal=False, h=1),
    Shape(100, 100, documents=(40, 0, 1, 35, 24)),
    Shape(100, 100, documents=(0, 97, 3, 0), window=30, h=1),
    Shape(70, 70, documents=(33, 37), causal=False, h=1),
]


def error(got: Tensor, truth: Tensor) -> float:
    """Relative error; absolute for gradients that are zero, for example of a query with a single key."""
    assert got.shape == truth.shape and got.isfinite().all()
    return float((got.double() - truth.double()).norm()) / max(float(truth.double().norm()), 1.0)


def truth(shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients, in fp64."""
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    out = reference(*inputs, causal=shape.causal, window=shape.window, cu_seqlens=shape.cu_seqlens())
    return out.detach(), *torch.autograd.grad(out, inputs, dout.double())


def by_op(shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_attention(*inputs, causal=shape.causal, window=shape.window, cu_seqlens=shape.cu_seqlens())
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


def by_triton(shape: Shape, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    options = (shape.causal, shape.window, shape.e**-0.5, shape.cu_seqlens(), shape.t)
    out, lse = portable.forward(q, k, v, *options)
    return out, *backward(dout, q, k, v, out, lse, *options)


def assert_close(got: tuple[Tensor, ...], right: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    errors = {name: error(x, y) for name, x, y in zip(("out", "dq", "dk", "dv"), got, right, strict=True)}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


def test_reference_equals_torch_attention() -> None:
    q, k, v, _ = Shape(9, 9, b=2, h=4, kv=2).inputs(torch.float64)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = F.scaled_dot_product_attention(heads_first[0], heads_first[1], heads_first[2], is_causal=True, enable_gqa=True)
    assert error(reference(q, k, v), theirs.transpose(1, 2)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", CAUSAL + OTHERS, ids=str)
def test_cpu_equals_the_reference(shape: Shape, dtype: torch.dtype) -> None:
    inputs = shape.inputs(dtype)
    assert_close(by_op(shape, *inputs), truth(shape, *inputs), dtype)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("shape", CAUSAL + OTHERS, ids=str)
def test_triton_equals_the_reference(shape: Shape) -> None:
    inputs = shape.inputs(torch.float32)
    assert_close(by_triton(shape, *inputs), truth(shape, *inputs), torch.float32)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("shape", [CAUSAL[4], OTHERS[1]], ids=str)
def test_triton_in_half_precision(shape: Shape) -> None:
    inputs = shape.inputs(torch.float16)
    assert_close(by_triton(shape, *inputs), truth(shape, *inputs), torch.float16)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("shape", [Shape(33, 70, b=2), Shape(70, 70, window=40, h=1), OTHERS[7]], ids=str)
def test_triton_with_tma(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "architecture", lambda device: 90)
    q, k, v, dout = shape.inputs(torch.float16)
    assert all(portable.tma_supports(x) for x in (q, k, v, dout))
    assert_close(by_triton(shape, q, k, v, dout), truth(shape, q, k, v, dout), torch.float16)


def test_tensors_that_tma_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "architecture", lambda device: 90)
    x = torch.zeros(2, 8, 4, 64, dtype=torch.bfloat16)
    packed = torch.zeros(2, 8, 3, 4, 64, dtype=torch.bfloat16)
    assert portable.tma_supports(x) and portable.tma_supports(packed[:, :, 1])
    assert not portable.tma_supports(x.float())
    assert not portable.tma_supports(x[..., :24])  # the next head would be in the tile
    assert not portable.tma_supports(x.transpose(1, 2)) and not portable.tma_supports(x[:, 1:])  # not one matrix
    assert not portable.tma_supports(torch.zeros(1, dtype=torch.bfloat16).expand(2, 8, 4, 64))
    assert not portable.tma_supports(torch.zeros(1, 8, 257, dtype=torch.bfloat16)[..., :-1].view(1, 8, 4, 64))


@pytest.mark.slow
@pytest.mark.parametrize("run", [by_op, pytest.param(by_triton, marks=interpreted)])
def test_input_strides(run: Callable[..., tuple[Tensor, ...]]) -> None:
    shape = Shape(40, 40, b=2, h=2, kv=2)
    q, k, v = torch.randn(2, 40, 3, 2, 16).unbind(2)  # slices of one projection
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    dout = torch.randn(2, 1, 2, 16).expand(2, 40, 2, 16)
    assert_close(run(shape, q, k, v, dout), truth(shape, q, k, v, dout), torch.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # in weights that a mask removes
@pytest.mark.parametrize("run", [by_op, pytest.param(by_triton, marks=interpreted)])
def test_extreme_values(run: Callable[..., tuple[Tensor, ...]]) -> None:
    """Scores of thousands, of either sign: fp32 has three digits for their differences, and most weights are zero or one."""
    shape = Shape(40, 40)
    q, k, v, dout = shape.inputs(torch.float32)
    q, k = q.round() * 20, k.round() * 20
    got, right = run(shape, q, k, v, dout), truth(shape, q, k, v, dout)
    assert error(got[0], right[0]) <= 1e-5
    assert max(float((x - y).norm() / dout.norm()) for x, y in zip(got[1:], right[1:], strict=True)) <= 2e-3


@pytest.mark.parametrize("run", [by_op, pytest.param(by_triton, marks=interpreted)])
def test_query_that_attends_to_no_key_has_zero_output(run: Callable[..., tuple[Tensor, ...]]) -> None:
    shape = Shape(40, 5)
    out, dq, _, _ = run(shape, *shape.inputs(torch.float32))
    assert (out[:, :35] == 0).all() and (dq[:, :35] == 0).all() and (out[:, 35:] != 0).all()


def test_lse_of_scaled_scores() -> None:
    q, k, v, _ = Shape(6, 4, kv=2).inputs(torch.float64)
    _, lse = torch.ops.strata.flash_attention(q, k, v, True, None, 0.5, None, None)
    scores = torch.einsum("bthe,bshe->bhts", q, k)[:, :, -1] * 0.5
    assert torch.allclose(lse[:, :, -1], scores.logsumexp(-1)) and (lse[:, :, :2] == -math.inf).all()
    if not torch.cuda.is_available():
        _, by_kernel = portable.forward(q.float(), k.float(), v.float(), True, None, 0.5, None, 6)
        assert torch.allclose(by_kernel, lse.float(), atol=1e-5)


@pytest.mark.parametrize(("b", "t", "s"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty(b: int, t: int, s: int) -> None:
    shape = Shape(t, s, b=b)
    q, k, v, dout = shape.inputs(torch.float32)
    out, *gradients = by_op(shape, q, k, v, dout)
    assert out.shape == q.shape and (out == 0).all()
    assert all(x.shape == y.shape and (x == 0).all() for x, y in zip(gradients, (q, k, v), strict=True))


@pytest.mark.parametrize(
    "shape", [Shape(3, 3, h=2, kv=1, e=2), Shape(3, 4, window=2, e=2), Shape(4, 4, documents=(3, 0, 1), e=2)]
)
def test_gradcheck(shape: Shape) -> None:
    q, k, v, _ = (x.requires_grad_() for x in shape.inputs(torch.float64))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, window=shape.window, cu_seqlens=shape.cu_seqlens())

    assert torch.autograd.gradcheck(attention, (q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Shape(5, 5, h=4, kv=2), Shape(7, 7, documents=(4, 0, 3))])
def test_opcheck(shape: Shape) -> None:
    q, k, v, dout = shape.inputs(torch.float32)
    options = (True, shape.window, 0.5, shape.cu_seqlens(), None)
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.strata.flash_attention.default, (*learned, *options))
    out, lse = torch.ops.strata.flash_attention(q, k, v, *options)
    torch.library.opcheck(torch.ops.strata.flash_attention_backward.default, (dout, q, k, v, out, lse, *options))


@pytest.mark.slow
def test_compiles_without_a_graph_break() -> None:
    q, k, v, dout = Shape(8, 8).inputs(torch.float32)
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v) + flash_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=5)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(*inputs), layer(*inputs), atol=1e-6)
    ours, right = (torch.autograd.grad(run(*inputs), inputs, dout) for run in (compiled, layer))
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(ours, right, strict=True))


def q_k_v(
    *, b: int = 2, heads: int = 4, kv: int = 2, e: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(b, 5, heads, e, dtype=dtype), torch.zeros(b, 5, kv, e, dtype=dtype), torch.zeros(b, 5, kv, e, dtype=dtype)


def test_invalid_arguments_are_rejected() -> None:
    q, k, v = q_k_v()
    with pytest.raises(
        ValueError, match=r"q \[b, t, h, e\] with k and v \[b, s, kv, e\], got q \[2, 5, 4, 8\], k \[2, 5, 2, 7\]"
    ):
        flash_attention(q, k[..., :7], v[..., :7])
    with pytest.raises(ValueError, match=r"multiple of k and v heads.* k \[2, 5, 3, 8\]"):
        flash_attention(*q_k_v(kv=3))
    with pytest.raises(ValueError, match=r"one of torch.bfloat16, .* got torch.float32, torch.float16, torch.float32"):
        flash_attention(q, k.half(), v)
    with pytest.raises(ValueError, match=r"got torch\.int32"):
        flash_attention(*q_k_v(dtype=torch.int32))
    with pytest.raises(ValueError, match="window of at least 1, the query itself, got 0"):
        flash_attention(q, k, v, window=0)
    with pytest.raises(ValueError, match="scale above 0, got -1"):
        flash_attention(q, k, v, scale=-1.0)
    with pytest.raises(ValueError, match=r"b = 1 and t = s, got q \[2"):
        flash_attention(q, k, v, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"int32 \[documents \+ 1\], got torch.int64 \[2\]"):
        flash_attention(*q_k_v(b=1), cu_seqlens=torch.tensor([0, 5]))
