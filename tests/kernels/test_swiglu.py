"""swiglu: the CPU implementation and the interpreted Triton kernels against the reference in fp64."""

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.swiglu import reference, swiglu, swiglu_backward_cpu, swiglu_backward_triton, swiglu_cpu, swiglu_triton

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the compiled kernels")
BOTH = [pytest.param("cpu"), pytest.param("triton", marks=interpreted)]
FORWARD = {"cpu": swiglu_cpu, "triton": swiglu_triton}
BACKWARD = {"cpu": swiglu_backward_cpu, "triton": swiglu_backward_triton}


def distance(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def gradients(gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    gate, up = gate.double().requires_grad_(), up.double().requires_grad_()
    return torch.autograd.grad(reference(gate, up), (gate, up), dout.double())


@pytest.mark.parametrize("code", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 3), (5, 127), (2, 7, 129), (3, 4097)])
@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward_equal_the_reference(code: str, dtype: torch.dtype, shape: tuple[int, ...], packed: bool) -> None:
    torch.manual_seed(shape[-1])
    if packed:
        gate, up = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype).chunk(2, -1)
    else:
        gate, up = torch.randn(2, *shape).to(dtype)
    dout = torch.randn(shape).to(dtype)
    out = FORWARD[code](gate, up)
    dgate, dup = BACKWARD[code](dout, gate, up)
    truth = gradients(gate, up, dout)
    for ours, expected in ((out, reference(gate.double(), up.double())), (dgate, truth[0]), (dup, truth[1])):
        assert ours.dtype == dtype and ours.is_contiguous()
        assert distance(ours, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("code", BOTH)
def test_transposed_input_and_expanded_gradient(code: str) -> None:
    torch.manual_seed(0)
    gate, up, dout = torch.randn(17, 5).T, torch.randn(5, 17), torch.randn(1, 1).expand(5, 17)
    assert torch.equal(FORWARD[code](gate, up), FORWARD[code](gate.contiguous(), up))
    grads = BACKWARD[code](dout, gate, up)
    assert all(map(torch.equal, grads, BACKWARD[code](dout.contiguous(), gate.contiguous(), up)))


@pytest.mark.parametrize("code", BOTH)
def test_empty(code: str) -> None:
    empty = torch.randn(3, 0)
    assert FORWARD[code](empty, empty).shape == (3, 0)
    assert [grad.shape for grad in BACKWARD[code](empty, empty, empty)] == [(3, 0), (3, 0)]


@pytest.mark.parametrize("code", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_saturated_gates(code: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-6e4, -100.0, 0.0, 100.0, 6e4]], dtype=dtype)
    up = torch.ones_like(gate)
    assert torch.equal(FORWARD[code](gate, up), torch.tensor([[0.0, 0.0, 0.0, 100.0, 6e4]], dtype=dtype).add(0.0))
    dgate, dup = BACKWARD[code](up, gate, up)
    assert torch.equal(dgate, torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0]], dtype=dtype))
    assert torch.equal(dup, torch.tensor([[0.0, 0.0, 0.0, 100.0, 6e4]], dtype=dtype))


def test_gradcheck() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up))


def test_opcheck() -> None:
    gate, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 16)[:, :8].requires_grad_()
    torch.library.opcheck(torch.ops.strata.swiglu.default, (gate, up))
    torch.library.opcheck(torch.ops.strata.swiglu_backward.default, (up.detach(), gate.detach(), up.detach()))


def test_compiles_without_a_graph_break() -> None:
    def halves(packed: Tensor) -> Tensor:
        return swiglu(*packed.chunk(2, -1)) * 2

    packed = torch.randn(3, 16, requires_grad=True)
    eager = halves(packed)
    compiled = torch.compile(halves, fullgraph=True, backend="aot_eager")(packed)
    assert torch.equal(compiled, eager)
    assert torch.equal(*(torch.autograd.grad(out.sum(), packed)[0] for out in (compiled, eager)))


def test_saves_only_its_inputs() -> None:
    saved: list[Tensor] = []
    gate, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        swiglu(gate, up)
    assert {tensor.data_ptr() for tensor in saved} == {gate.data_ptr(), up.data_ptr()}


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"one shape and dtype, got \[2, 4\] torch.float32 and \[2, 5\] torch.float32"):
        swiglu(torch.ones(2, 4), torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"float16 or bfloat16 .*got torch.int32"):
        swiglu(*torch.ones(2, 4, dtype=torch.int32))
