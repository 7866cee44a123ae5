"""w4a16_linear: packing of checkpoint layouts, the CPU implementation and the interpreted Triton kernel against plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.ops.w4a16_linear.kernel import w4a16_linear_triton
from strata.kernels.ops.w4a16_linear.packing import AWQ_ORDER, PackedWeight, pack, pack_awq, pack_gptq, unpack
from strata.kernels.ops.w4a16_linear.w4a16_linear import random_weight, w4a16_linear, w4a16_linear_cpu

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the compiled kernel")
BOTH = [pytest.param(w4a16_linear_cpu, id="cpu"), pytest.param(w4a16_linear_triton, id="triton", marks=interpreted)]
CPU = torch.device("cpu")

Linear = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def words(nibbles: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 words [..., n / 8] of nibbles [..., n]: bits 4i hold element order[i]."""
    grouped = nibbles.long().unflatten(-1, (-1, 8))
    total = sum(grouped[..., column] << (4 * place) for place, column in enumerate(order))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def exact(nibbles: Tensor, scales: Tensor, zeros: Tensor | int) -> Tensor:
    """Weights [outputs, inputs], one input at a time."""
    size = nibbles.shape[0] // scales.shape[0]
    rows = [
        (nibbles[k].double() - (zeros if isinstance(zeros, int) else zeros[k // size].double())) * scales[k // size].double()
        for k in range(nibbles.shape[0])
    ]
    return torch.stack(rows, 1)


def drawn(inputs: int, outputs: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(inputs + outputs + groups)
    nibbles = torch.randint(0, 16, (inputs, outputs))
    return nibbles, torch.rand(groups, outputs).half() + 0.1, torch.randint(1, 16, (groups, outputs))


@pytest.mark.parametrize(
    "inputs, groups", [(256, 8), (256, 4), (256, 2), (512, 2), (384, 1), (96, 3), (192, 3), (160, 1), (40, 1)]
)
def test_checkpoints_are_unpacked_to_their_weights(inputs: int, groups: int) -> None:
    """Groups of 32, 64, 128, 256 and one of all inputs, and inputs that are not whole chunks."""
    nibbles, scales, zeros = drawn(inputs, 24, groups)
    asymmetric = exact(nibbles, scales, zeros).float()
    gptq = words(nibbles.T).T.contiguous()
    g_idx = torch.arange(inputs) // (inputs // groups)
    for packed in (
        pack_gptq(gptq, scales, words(zeros - 1), g_idx.int()),
        pack_gptq(gptq, scales, words(zeros), zero_offset=0),
        pack_awq(words(nibbles, AWQ_ORDER), scales, words(zeros, AWQ_ORDER)),
        pack(nibbles, scales, zeros),
    ):
        assert torch.equal(unpack(packed, inputs), asymmetric)
    symmetric = exact(nibbles, scales, 8).float()
    assert torch.equal(unpack(pack_gptq(gptq, scales), inputs), symmetric)
    assert torch.equal(unpack(pack_gptq(gptq, scales, words(torch.full_like(zeros, 7))), inputs), symmetric)


def test_gptq_zero_points_are_one_to_sixteen() -> None:
    nibbles, scales, _ = drawn(32, 8, 1)
    stored = torch.tensor([[0, 15, 7, 8, 1, 14, 3, 2]])
    weight = pack_gptq(words(nibbles.T).T.contiguous(), scales, words(stored))
    assert weight.zeros is not None and weight.zeros[0].tolist() == [1, 16, 8, 9, 2, 15, 4, 3]
    assert torch.equal(unpack(weight, 32), exact(nibbles, scales, stored + 1).float())


def test_activation_order_is_refused() -> None:
    nibbles, scales, _ = drawn(64, 8, 2)
    with pytest.raises(ValueError, match=r"activation order.*desc_act=False"):
        pack_gptq(words(nibbles.T).T.contiguous(), scales, g_idx=torch.randperm(64) // 32)


@pytest.mark.parametrize("linear", BOTH)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "tokens, inputs, outputs, group",
    [
        (1, 1024, 16, 128),
        (3, 512, 24, 32),
        (9, 256, 40, 64),
        (5, 96, 8, 32),
        (17, 192, 16, 64),
        (2, 512, 8, 512),
        (130, 128, 8, 128),
    ],
)
def test_equals_plain_torch(linear: Linear, symmetric: bool, tokens: int, inputs: int, outputs: int, group: int) -> None:
    torch.manual_seed(tokens)
    weight = random_weight(inputs, outputs, group, CPU, torch.float16, symmetric)
    x, bias = torch.randn(tokens, inputs).half(), torch.randn(outputs).half()
    for added in (None, bias):
        truth = x.double() @ unpack(weight, inputs).double().T + (0 if added is None else added.double())
        out = linear(x, *weight, added)
        assert out.dtype == torch.float16 and float((out.double() - truth).norm() / truth.norm()) < 4e-4


@pytest.mark.parametrize("linear", BOTH)
def test_every_weight_is_read_at_its_place(linear: Linear) -> None:
    """Rows of the identity select single columns of the weight, over several programs of split inputs. Exact."""
    nibbles, scales, zeros = drawn(1152, 8, 9)
    weight = pack(nibbles, torch.ones_like(scales), zeros)
    inputs = torch.randperm(1152)[:64]
    x = torch.zeros(64, 1152, dtype=torch.float16)
    x[torch.arange(64), inputs] = 1
    assert torch.equal(linear(x, *weight, None).float(), (nibbles - zeros.repeat_interleave(128, 0)).float()[inputs])


@pytest.mark.parametrize("linear", BOTH)
def test_shapes_and_strides_of_activations(linear: Linear) -> None:
    weight = random_weight(128, 8, 128, CPU, torch.float16)
    x = torch.randn(2, 3, 256).half()
    expected = linear(x[..., :128].contiguous(), *weight, None)
    assert expected.shape == (2, 3, 8)
    assert torch.equal(linear(x[..., :128], *weight, None), expected)
    assert torch.equal(linear(x.mT.contiguous().mT[..., :128], *weight, None), expected)
    assert linear(x[:0, :, :128], *weight, None).shape == (0, 3, 8)
    assert torch.equal(linear(x[0, 0, :128], *weight, None), expected[0, 0])


@pytest.mark.slow
def test_opcheck() -> None:
    weight = random_weight(128, 8, 32, CPU, symmetric=False)
    arguments = (torch.randn(3, 128).bfloat16(), *weight, torch.randn(8).bfloat16())
    torch.library.opcheck(torch.ops.strata.w4a16_linear.default, arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, 300)}, r"2 chunks of 128 inputs, got \[2, 300\]"),
        ({"x": torch.zeros(2, 256).int()}, "bfloat16 or float16.*torch.int32"),
        ({"packed": torch.zeros(2, 8, 32, dtype=torch.int32)}, "int16.*torch.int32"),
        ({"packed": torch.zeros(2, 8, 16, dtype=torch.int16)}, r"\[chunks, outputs, 32\]"),
        ({"scales": torch.zeros(3, 8)}, r"\[1, 2 or 4 per chunk, 8\] for 2 chunks, got \[3, 8\]"),
        ({"zeros": torch.zeros(2, 8)}, "uint8 zero points.*float32"),
        ({"bias": torch.zeros(7)}, r"bias of 8 outputs, got \[7\]"),
        ({"scales": torch.zeros(8, 2).T}, "contiguous"),
        ({"x": torch.zeros(2, 256, requires_grad=True)}, "no gradient"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict[str, Tensor], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(2, 256),
        "packed": torch.zeros(2, 8, 32, dtype=torch.int16),
        "scales": torch.zeros(2, 8),
    }
    with pytest.raises(ValueError, match=message):
        w4a16_linear(**arguments | change)


@pytest.mark.parametrize("inputs, groups", [(256, 5), (192, 4), (320, 5 * 4)])
def test_unsupported_groups_are_refused(inputs: int, groups: int) -> None:
    with pytest.raises(ValueError, match=f"32, 64 or a multiple of 128 inputs.*got {groups} groups of {inputs}"):
        pack(torch.zeros(inputs, 8, dtype=torch.uint8), torch.zeros(groups, 8))


def test_packed_weight_has_half_a_byte_per_weight() -> None:
    weight = random_weight(256, 16, 128, CPU)
    assert isinstance(weight, PackedWeight) and weight.packed.nbytes == 256 * 16 // 2
