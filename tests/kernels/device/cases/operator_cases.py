"""Operators: equal to the CPU's for shapes, strides and dtypes, with autograd; counted where they fall back."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels import device, linear_cross_entropy, rms_norm, rope, swiglu

device.load()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    device.clear_fallbacks()


def there(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same values, strides and offsets on the device."""
    moved = []
    for tensor in tensors:
        storage = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(tensor.untyped_storage())
        copy = storage.to("strata").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        moved.append(copy)
    return tuple(moved)


def assert_same(call: Callable[..., object], *inputs: Tensor, native: bool = True) -> None:
    """Same results, dtypes and strides on both devices; `native`: without falling back."""
    expected, found = call(*inputs), call(*there(*inputs))
    for a, b in zip(flat(expected), flat(found), strict=True):
        assert b.device.type == "strata" and b.dtype == a.dtype and b.shape == a.shape
        # torch's meta kernels compute bfloat16 through float32, which makes expanded inputs dense before strides are chosen.
        assert b.stride() == a.stride() or any(x.dtype == torch.bfloat16 for x in inputs)
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)
    assert bool(device.fallbacks()) != native, device.fallbacks()


def flat(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in flat(part)]  # type: ignore[attr-defined]


def layouts(dtype: torch.dtype) -> list[Tensor]:
    """Tensors of [3, 4]: contiguous, transposed, every other column, at an offset, expanded."""

    def values(*shape: int) -> Tensor:
        return torch.randint(0, 2, shape).bool() if dtype == torch.bool else (torch.randn(shape) * 4).to(dtype)

    return [values(3, 4), values(4, 3).t(), values(3, 8)[:, ::2], values(5, 6)[2:, 1:5], values(1, 4).expand(3, 4)]


BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, torch.eq, torch.lt, torch.where]
UNARY = [torch.neg, torch.abs, torch.exp, torch.rsqrt, torch.sigmoid, torch.tanh, F.silu, F.gelu, F.relu, torch.isneginf]
REDUCTIONS: list[Callable[[Tensor], object]] = [
    lambda x: x.sum(),
    lambda x: x.sum(1),
    lambda x: x.mean(0, keepdim=True),
    lambda x: x.amax(-1),
    lambda x: x.max(1),
    lambda x: x.argmax(1),
    lambda x: x.std(1),
    lambda x: x.cumsum(1),
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(0),
    lambda x: x.norm(),
    lambda x: x.topk(2, dim=1),
    lambda x: x.sort(dim=1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("call", BINARY, ids=lambda call: call.__name__)
def test_binary(call: Callable[..., Tensor], dtype: torch.dtype) -> None:
    if dtype == torch.bool and call is torch.sub:  # which torch does not have
        call = torch.logical_xor
    for a in layouts(dtype):
        for b in layouts(dtype):
            assert_same(lambda x, y: call(x > 0, x, y) if call is torch.where else call(x, y), a, b)


@pytest.mark.parametrize("call", UNARY, ids=lambda call: call.__name__)
def test_unary(call: Callable[[Tensor], Tensor]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for x in layouts(dtype):
            assert_same(call, x)


@pytest.mark.parametrize("index", range(len(REDUCTIONS)))
def test_reductions(index: int) -> None:
    for x in layouts(torch.float32):
        assert_same(REDUCTIONS[index], x)


def test_dtypes_are_promoted_as_on_the_cpu() -> None:
    half, whole, flag = torch.randn(3).bfloat16(), torch.arange(3), torch.tensor([True, False, True])
    number = torch.tensor(2.5)  # of the host: one value
    for call in (lambda x: x + 1.5, lambda x: 2 * x, lambda x: x / 2, lambda x: x**2, lambda x: x > 0.5, lambda x: x * number):
        for x in (half, whole, flag):
            assert_same(call, x)
    assert_same(lambda a, b: a + b, half, whole)
    assert_same(lambda a, b: a * b, whole, flag)


def test_products() -> None:
    a, b, c = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(5)
    assert_same(torch.bmm, a, b)
    assert_same(torch.matmul, a, b.transpose(1, 2).contiguous().transpose(1, 2))
    assert_same(lambda x, y, z: torch.addmm(z, x, y, beta=0.5, alpha=2), a[0], b[0], c)
    assert_same(lambda x, y, z: F.linear(x, y, z), a, torch.randn(5, 4), c)
    assert_same(torch.mm, a[0].bfloat16(), b[0].bfloat16())


def test_indexing() -> None:
    x, rows, columns = torch.randn(5, 6), torch.tensor([4, 0, 4]), torch.tensor([1, 5, 0])
    assert_same(lambda x, i, j: x[i, j], x, rows, columns)
    assert_same(lambda x, i: x[:, i], x, rows)
    assert_same(lambda x, i: x.index_select(0, i), x, rows)
    assert_same(lambda x, i: x.gather(1, i[:, None].expand(3, 2)), x, rows)
    assert_same(lambda x, i: F.embedding(i, x), x, rows)
    assert_same(lambda x, i: x.scatter(0, i[None], 1.0), x, torch.tensor([0, 1, 2, 0, 1, 2]))
    assert_same(lambda x, y: torch.cat([x, y, x[:1]]), x, x + 1)
    assert_same(lambda x: torch.stack([x, x.tril(), x.triu(1)]), x)

    def put(x: Tensor, i: Tensor) -> Tensor:
        y = x.clone()
        y[i] = 7
        y[1:3, ::2] = y[3:, 1::2]
        return y

    assert_same(put, x, rows)
    assert x.to("strata")[rows].cpu().equal(x[rows]), "indices may be on the host"


def test_masks_decide_shapes_and_fall_back() -> None:
    x = torch.randn(4, 5)
    assert_same(lambda x: x[x > 0], x, native=False)
    assert device.fallbacks() == {"aten::index.Tensor": 1}


def test_views_share_memory() -> None:
    x = torch.arange(24.0, device="strata").view(2, 3, 4)
    views = [x.transpose(0, 2), x[1], x[:, ::2], x.permute(1, 2, 0), x.view(6, 4), x.unfold(2, 2, 1), x.diagonal(dim1=1, dim2=2)]
    assert all(view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for view in views)
    expected = torch.arange(24.0).view(2, 3, 4)
    x[:, 1].transpose(0, 1).mul_(-1)
    expected[:, 1].transpose(0, 1).mul_(-1)
    assert x.cpu().equal(expected)
    assert views[0].cpu().equal(expected.transpose(0, 2)) and x.reshape(4, 6).t().contiguous().cpu().equal(
        expected.reshape(4, 6).t()
    )


def test_in_place_and_out() -> None:
    x = torch.randn(3, 4)
    assert_same(lambda x: x.clone().add_(1).mul_(x).clamp_(-1, 1).masked_fill_(x > 0, 9).zero_().fill_(2), x)
    for out in (torch.empty(0, device="strata"), torch.empty(3, 3, device="strata")):
        moved = x.to("strata")
        assert torch.mm(moved, moved.t(), out=out) is out
        assert out.cpu().equal(x @ x.t())
    with pytest.warns(UserWarning, match="resized"):
        torch.add(x.to("strata"), 1, out=torch.empty(2, device="strata"))


def test_empty_tensors() -> None:
    nothing = torch.empty(0, 4)
    assert_same(lambda x: x + 1, nothing)
    assert_same(lambda x: x.sum(), nothing)
    assert_same(lambda x: x @ torch.ones(4, 2, device=x.device), nothing)
    assert_same(lambda x: torch.cat([x, x]), nothing)


def test_factories() -> None:
    for make in (
        lambda place: torch.arange(2, 20, 3, device=place),
        lambda place: torch.full((2, 3), 7, device=place),
        lambda place: torch.eye(3, device=place),
        lambda place: torch.linspace(0, 1, 5, device=place),
        lambda place: torch.tensor([[1.5, 2], [3, 4]], device=place),
        lambda place: torch.ones(2, dtype=torch.bool, device=place),
    ):
        assert make("strata").cpu().equal(make("cpu")) and make("strata").dtype == make("cpu").dtype


def gradients(call: Callable[..., Tensor], place: str, *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().to(place).requires_grad_(x.is_floating_point()) for x in inputs]
    y = call(*leaves)
    y.backward(torch.ones_like(y) * torch.arange(y.numel(), device=place).view(y.shape))
    return [y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, i: F.cross_entropy(x @ w, i),
        lambda x, w, i: F.silu(x @ w).softmax(-1),
        lambda x, w, i: F.embedding(i, w) * 2,
        lambda x, w, i: F.layer_norm(x, (6,)) @ w,
        lambda x, w, i: x[i].pow(2).mean(-1).rsqrt(),
        lambda x, w, i: F.gelu(x).t().matmul(x)[:, i],
        lambda x, w, i: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True),
    ],
)
def test_gradients(call: Callable[..., Tensor]) -> None:
    inputs = torch.randn(4, 6), torch.randn(6, 5), torch.tensor([3, 0, 1, 3])
    for a, b in zip(gradients(call, "cpu", *inputs), gradients(call, "strata", *inputs), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert not device.fallbacks()


def test_operators_of_strata_fall_back_to_their_cpu_kernels() -> None:
    """Defined in Python for CPU and CUDA alone: their meta kernels and gradients serve the device unchanged."""
    x, w, targets = torch.randn(8, 6), torch.randn(5, 6), torch.randint(0, 5, (8,))
    calls: list[Callable[..., Tensor]] = [
        lambda x, w, t: rms_norm(x, w[0], 1e-6),
        lambda x, w, t: swiglu(x, x.flip(0)),
        lambda x, w, t: linear_cross_entropy(x, w, t),
        lambda x, w, t: rope(x.view(1, 8, 1, 6), x.view(1, 8, 1, 6), x[:, :3], x[:, 3:])[0].view(8, 6).detach() * x,
    ]
    for call in calls:
        for a, b in zip(gradients(call, "cpu", x, w, targets), gradients(call, "strata", x, w, targets), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    assert {"strata::rms_norm", "strata::rms_norm_backward", "strata::swiglu", "strata::linear_cross_entropy"} <= set(
        device.fallbacks()
    )


def test_an_operator_without_a_kernel_falls_back_and_is_counted() -> None:
    x = torch.rand(3, 3) + torch.eye(3)
    moved = x.to("strata")
    for _ in range(2):
        torch.testing.assert_close(torch.linalg.inv(moved).cpu(), torch.linalg.inv(x))
    torch.testing.assert_close(moved.erfinv_().cpu(), x.erfinv(), equal_nan=True)
    assert device.fallbacks() == {"aten::linalg_inv_ex.inverse": 2, "aten::erfinv.out": 1}
    device.clear_fallbacks()
    assert device.fallbacks() == {}


def test_devices_do_not_mix() -> None:
    here, other = torch.ones(3, device="strata"), torch.ones(3, device="strata:1")
    for call in (lambda: here + torch.ones(3), lambda: here + other, lambda: torch.cat([here, other]), lambda: here.equal(other)):
        with pytest.raises(RuntimeError, match="same device"):
            call()


def test_its_own_operator_has_meta_autograd_and_device_kernels() -> None:
    own = torch.ops.strata_device.rms_norm
    x, weight, dy = torch.randn(4, 5, 6), torch.randn(6), torch.randn(4, 5, 6)
    y, rstd = own(torch.empty(4, 5, 6, device="meta"), torch.empty(6, device="meta"), 1e-6)
    assert y.shape == (4, 5, 6) and rstd.shape == (4, 5) and y.device.type == "meta"
    for layout in (x, x.transpose(0, 1)):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (layout, weight)]
        moved = [tensor.detach().to("strata").requires_grad_() for tensor in (layout, weight)]
        expected, (found, _) = rms_norm(*leaves, 1e-6), own(*moved, 1e-6)
        torch.testing.assert_close(found.cpu(), expected)
        expected.backward(dy.view_as(expected))
        found.backward(dy.view_as(expected).to("strata"))
        for a, b in zip(leaves, moved, strict=True):
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="as wide as its rows"):
        own(x.to("strata"), weight[:5].to("strata"), 1e-6)
    arguments = (x.to("strata").requires_grad_(), weight.to("strata").requires_grad_(), 1e-6)
    torch.library.opcheck(own, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
