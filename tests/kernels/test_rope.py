"""rope and rope_: the CPU implementation and the interpreted Triton kernel against the reference in fp64."""

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.rope import reference, rope, rope_, rope_cpu, rope_in_place_cpu, rope_in_place_triton, rope_triton

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the compiled kernel")
BOTH = [pytest.param("cpu"), pytest.param("triton", marks=interpreted)]
ROPE = {"cpu": rope_cpu, "triton": rope_triton}
IN_PLACE = {"cpu": rope_in_place_cpu, "triton": rope_in_place_triton}


def distance(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def table(tokens: int, half: int, *batch: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(*batch, tokens, half)
    return angles.cos(), angles.sin()


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return reference(q.double(), k.double(), cos.double(), sin.double(), interleaved=interleaved)


# In the interpreter, thousands of tokens are thousands of sequential programs.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "tokens"), [("cpu", 4097), *(pytest.param("triton", n, marks=interpreted) for n in (1, 127, 129))]
)
def test_any_number_of_tokens(code: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    q, k = torch.randn(1, tokens, 2, 16), torch.randn(1, tokens, 1, 16)
    cos, sin = table(tokens, 8)
    for ours, truth in zip(ROPE[code](q, k, cos, sin, False, False), rotated(q, k, cos, sin, False), strict=True):
        assert distance(ours, truth) < TOLERANCE[torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("code", BOTH)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 2, 1), (3, 1, 8, 3), (4, 2, 128, 64), (8, 8, 40, 16), (5, 3, 7, 2)])
def test_rotation_and_its_inverse_equal_the_reference(
    code: str, interleaved: bool, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    heads, kv_heads, dim, half = shape
    torch.manual_seed(dim)
    q, k = torch.randn(2, 3, heads, dim).to(dtype), torch.randn(2, 3, kv_heads, dim).to(dtype)
    cos, sin = table(3, half)
    truth = rotated(q, k, cos, sin, interleaved)
    ours = ROPE[code](q, k, cos, sin, interleaved, False)
    back = ROPE[code](*ours, cos, sin, interleaved, True)
    in_place = q.clone(), k.clone()
    IN_PLACE[code](*in_place, cos, sin, None, interleaved)
    for x, y, placed, expected, returned in zip((q, k), ours, in_place, truth, back, strict=True):
        assert y.dtype == dtype
        assert distance(y, expected) < TOLERANCE[dtype]
        assert torch.equal(placed, y)
        assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])
        assert distance(returned, x) < TOLERANCE[dtype]


@pytest.mark.parametrize("code", BOTH)
def test_head_layouts_and_a_table_per_sequence(code: str) -> None:
    torch.manual_seed(0)
    cos, sin = table(5, 4, 2)
    heads_first = torch.randn(2, 6, 5, 8).transpose(1, 2), torch.randn(2, 2, 5, 8).transpose(1, 2)
    packed = torch.split(torch.randn(2, 5, 10, 8), [6, 2, 2], dim=2)[:2]
    columns = torch.randn(2, 5, 8, 6).transpose(2, 3), torch.randn(2, 5, 8, 2).transpose(2, 3)
    for q, k in (heads_first, packed, columns):
        truth = rotated(q, k, cos, sin, interleaved=False)
        for ours, x, expected in zip(ROPE[code](q, k, cos, sin, False, False), (q, k), truth, strict=True):
            assert distance(ours, expected) < 1e-5
            assert ours.stride() == torch.empty_like(x if x.stride(-1) == 1 else x.contiguous()).stride()


@pytest.mark.parametrize("code", BOTH)
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_index_the_table(code: str, interleaved: bool) -> None:
    """As in serving: queries and keys are views of one projection, sequences are concatenated, the table is a slice."""
    torch.manual_seed(0)
    cos, sin = (half.contiguous() for half in torch.randn(50, 8).chunk(2, -1))
    packed = torch.randn(6, 7, 12)
    before = packed.clone()
    q, k, _ = torch.split(packed, [4, 1, 2], dim=1)
    positions = torch.tensor([0, 49, 7, 7, 3, 1])
    truth = rotated(q[None], k[None], cos[positions], sin[positions], interleaved)
    wide = torch.cat((cos, sin), -1)
    IN_PLACE[code](q, k, wide[:, :4], wide[:, 4:], positions, interleaved)
    assert distance(q, truth[0][0]) < 1e-5 and distance(k, truth[1][0]) < 1e-5
    assert torch.equal(packed[:, 5:], before[:, 5:])


@pytest.mark.parametrize("code", BOTH)
def test_no_tokens(code: str) -> None:
    q, k = torch.randn(2, 0, 4, 8), torch.randn(2, 0, 2, 8)
    cos, sin = table(0, 4)
    ours = ROPE[code](q, k, cos, sin, False, False)
    assert [x.shape for x in ours] == [q.shape, k.shape]
    IN_PLACE[code](q, k, cos, sin, None, False)
    IN_PLACE[code](q[0], k[0], *table(9, 4), torch.zeros(0, dtype=torch.int64), False)


@pytest.mark.parametrize("code", BOTH)
def test_large_values_in_fp16(code: str) -> None:
    q = torch.tensor([5e4, 3e4], dtype=torch.float16).view(1, 1, 1, 2)
    cos, sin = torch.full((1, 1), 0.8), torch.full((1, 1), 0.6)
    for ours in ROPE[code](q, q, cos, sin, False, False):
        assert distance(ours, torch.tensor([2.2e4, 5.4e4]).view_as(q)) < 2e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(interleaved: bool) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (2, 1))
    cos, sin = (part.double() for part in table(3, 3))
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin, interleaved=interleaved), (q, k))


def test_opcheck() -> None:
    q, k = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 2, 3, 8).transpose(1, 2).requires_grad_()
    cos, sin = table(3, 4)
    torch.library.opcheck(torch.ops.strata.rope.default, (q, k, cos, sin, False, False))
    torch.library.opcheck(torch.ops.strata.rope_.default, (q.detach(), k.detach(), cos, sin, None, False))


def test_compiles_without_a_graph_break() -> None:
    cos, sin = table(3, 4)
    q, k = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 3, 2, 8)

    def scores(q: Tensor, k: Tensor) -> Tensor:
        q, k = rope(q, k, cos, sin)
        return q.flatten(2).sum(-1) * k.flatten(2).sum(-1)

    eager = scores(q, k)
    compiled = torch.compile(scores, fullgraph=True, backend="aot_eager")(q, k)
    assert torch.equal(compiled, eager)
    assert torch.equal(*(torch.autograd.grad(out.sum(), q)[0] for out in (compiled, eager)))


def test_in_place_compiles_without_a_graph_break() -> None:
    cos, sin = table(9, 4)
    positions = torch.tensor([8, 0, 3])

    def packed_projection(qkv: Tensor) -> Tensor:
        q, k, v = torch.split(qkv.view(3, 4, 8), [2, 1, 1], dim=1)
        rope_(q, k, cos, sin, positions=positions)
        return torch.stack((q.sum(), k.sum(), v.sum()))

    qkv = torch.randn(3, 32)
    eager, compiled = qkv.clone(), qkv.clone()
    assert torch.equal(torch.compile(packed_projection, fullgraph=True, backend="aot_eager")(compiled), packed_projection(eager))
    assert torch.equal(compiled, eager) and not torch.equal(eager, qkv)


def test_invalid_arguments_are_rejected() -> None:
    q, k, (cos, sin) = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8), table(3, 4)
    with pytest.raises(ValueError, match=r"float16 or bfloat16 .*got torch.int64"):
        rope(q.long(), k.long(), cos, sin)
    with pytest.raises(ValueError, match=r"only in the number of heads, got \[2, 3, 4, 8\] torch.float32 and \[2, 3, 2, 6\]"):
        rope(q, k[..., :6], cos, sin)
    with pytest.raises(ValueError, match=r"up to 4 angles .*got \[3, 5\]"):
        rope(q, k, *table(3, 5))
    with pytest.raises(ValueError, match=r"\[batch, tokens, half\], got \[2, 3, 4, 8\] and \[4, 4\]"):
        rope(q, k, *table(4, 4))
    with pytest.raises(ValueError, match=r"positions \[tokens\] expects q \[tokens, heads, dim\].*\[2\], \[3, 4, 8\]"):
        rope_(q[0], k[0], cos, sin, positions=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="a stride of 1"):
        rope_(q.transpose(2, 3).contiguous().transpose(2, 3), k, cos, sin)
    with pytest.raises(ValueError, match="no gradient"):
        rope_(q.requires_grad_(), k, cos, sin)
