"""Norms of CPU engines against vLLM's own."""

import platform
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from vllm.ir.op import IrOp
from vllm.ir.ops import fused_add_rms_norm, rms_norm

from strata.serving.engine import cpu_norms

pytestmark = pytest.mark.skipif(not cpu_norms.BUILT, reason="this build of vLLM has no such kernels")
OPERATORS = (rms_norm, fused_add_rms_norm)
EPSILON = 1e-5


@pytest.fixture(autouse=True)
def priorities() -> Iterator[None]:
    before = [operator.get_priority() for operator in OPERATORS]
    for operator in OPERATORS:
        operator.set_default(["native"])
    cpu_norms.use()
    yield
    for operator, priority in zip(OPERATORS, before, strict=True):
        operator.set_default(priority)


def made(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(*size, dtype=dtype) for size in (shape, shape, shape[-1:]))  # type: ignore[return-value]


def chosen(operator: IrOp, *given: object) -> str:
    return str(operator.dispatch(*given).provider)


@pytest.mark.parametrize("shape", [(1, 32), (7, 128), (3, 5, 96), (128, 2048), (0, 64)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)], ids=["fp32", "bf16", "fp16"]
)
def test_norms_equal_vllms_own(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    """Half types: a unit in the last place or two, since vLLM's own rounds once more, before the weight."""
    if dtype is not torch.float32 and platform.machine() != "x86_64":
        pytest.skip("only on x86 does vLLM choose kernels by the instructions that the CPU has")
    x, other, weight = made(*shape, dtype=dtype)
    assert chosen(rms_norm, x, weight, EPSILON) == chosen(fused_add_rms_norm, x, other, weight, EPSILON) == cpu_norms.NAME
    expected = rms_norm.impls["native"].impl_fn(x, weight, EPSILON)
    both = fused_add_rms_norm.impls["native"].impl_fn(x, other, weight, EPSILON)
    torch.testing.assert_close(rms_norm(x, weight, EPSILON), expected, rtol=tolerance, atol=tolerance)
    before = x.clone()
    torch.testing.assert_close(fused_add_rms_norm(x, other, weight, EPSILON), both, rtol=tolerance, atol=tolerance)
    assert torch.equal(x, before), "only the variant in place overwrites its arguments"
    torch.testing.assert_close(fused_add_rms_norm.maybe_inplace(x, other, weight, EPSILON), both, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reason", ["strided", "odd width", "no weight", "weight of another type", "a part of the row"])
def test_other_norms_are_vllms_own(reason: str) -> None:
    """Such as norms of queries and keys, which are parts of a larger tensor."""
    x, _, weight = made(4, 250 if reason == "odd width" else 256)
    given = {"x": x, "weight": weight, "epsilon": EPSILON, "variance_size": None}
    given |= {
        "strided": {"x": torch.randn(4, 3, 512)[..., :256]},
        "no weight": {"weight": None},
        "weight of another type": {"weight": weight.half()},
        "a part of the row": {"variance_size": 128},
        "odd width": {},
    }[reason]
    assert chosen(rms_norm, *given.values()) == "native"
    assert torch.isfinite(rms_norm(*given.values())).all()
    sums = {"x": given["x"], "x_residual": torch.zeros_like(given["x"])} | given  # type: ignore[call-overload]
    assert chosen(fused_add_rms_norm, *sums.values()) == "native"


def test_a_residual_of_another_layout_is_vllms_own() -> None:
    x, other, weight = made(4, 64)
    assert chosen(fused_add_rms_norm, x, other.half(), weight, EPSILON) == "native"
    assert chosen(fused_add_rms_norm, x, torch.randn(4, 128)[:, :64], weight, EPSILON) == "native"


def test_another_choice_of_the_engine_stays() -> None:
    if "other" not in rms_norm.impls:
        rms_norm.register_impl("other")(rms_norm.impls["native"].impl_fn)
    rms_norm.set_default(["other"])
    cpu_norms.use()
    assert chosen(rms_norm, *made(4, 64)[::2], EPSILON) == "other"
