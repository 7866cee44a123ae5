"""w4a16_linear in vLLM's linear layers, on a CPU: selection, refusals, and results from the parameters of checkpoints."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels import vllm_plugin
from strata.kernels.vllm_plugin.switch import WITHOUT

pytest.importorskip("vllm")

INPUTS, OUTPUTS, GROUP = 256, 48, 64


@pytest.fixture
def cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[type]]:
    """vLLM's list of kernels on CUDA, which this test changes, and the environment of an engine with `w4a16_linear`."""
    from vllm.model_executor.kernels import linear as kernels
    from vllm.platforms import PlatformEnum, current_platform

    from strata.kernels.vllm_plugin.linear import StrataW4A16LinearKernel

    listed = list(kernels._POSSIBLE_KERNELS[PlatformEnum.CUDA])
    monkeypatch.setitem(kernels._POSSIBLE_KERNELS, PlatformEnum.CUDA, listed)
    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CUDA)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(StrataW4A16LinearKernel, "registered", False)
    for name, value in vllm_plugin.environment(["w4a16_linear"]).items():
        monkeypatch.setenv(name, value)
    vllm_plugin.register()
    vllm_plugin.register()
    yield listed


def layer_config(**other: Any) -> Any:
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    good = {
        "full_weight_shape": (INPUTS, OUTPUTS),
        "partition_weight_shape": (INPUTS, OUTPUTS),
        "weight_type": scalar_types.uint4b8,
        "act_type": torch.bfloat16,
        "group_size": GROUP,
        "zero_points": False,
        "has_g_idx": False,
    }
    return MPLinearLayerConfig(**(good | other))


def test_engine_selects_the_kernel_for_4_bit_weights(cuda_kernels: list[type], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels.linear import choose_mp_linear_kernel
    from vllm.scalar_type import scalar_types

    from strata.kernels.vllm_plugin.linear import StrataW4A16LinearKernel

    assert cuda_kernels.count(StrataW4A16LinearKernel) == 1
    assert choose_mp_linear_kernel(layer_config(), 90) is StrataW4A16LinearKernel
    zeros = layer_config(weight_type=scalar_types.uint4, zero_points=True)
    assert choose_mp_linear_kernel(zeros, 90) is StrataW4A16LinearKernel
    with pytest.raises(ValueError, match=r"w4a16_linear supports uint4 with zero points and uint4b8, got uint8b128 without"):
        choose_mp_linear_kernel(layer_config(weight_type=scalar_types.uint8b128), 90)
    monkeypatch.delenv(WITHOUT)
    assert choose_mp_linear_kernel(layer_config(), 75) is not StrataW4A16LinearKernel


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"group_size": 48}, "groups of 32, 64 or a multiple of 128 inputs, got 48"),
        ({"partition_weight_shape": (224, OUTPUTS)}, "224 inputs of a GPU are not whole groups of 64"),
        ({"has_g_idx": True}, "not those of activation order"),
        ({"act_type": torch.float8_e4m3fn}, "got torch.float8_e4m3fn"),
        ({"partition_weight_shape": (2**20, 2**13), "group_size": -1}, "fewer than 2\\*\\*33 weights"),
    ],
)
def test_unsupported_layers_have_a_reason(changed: dict[str, Any], reason: str) -> None:
    from strata.kernels.vllm_plugin.linear import StrataW4A16LinearKernel

    possible, why = StrataW4A16LinearKernel.can_implement(layer_config(**changed))
    assert not possible and why is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(why)


def words(nibbles: Tensor, dim: int) -> Tensor:
    """int32 words of eight nibbles along `dim`, lowest bits first."""
    split = nibbles.to(torch.int32).unflatten(dim, (-1, 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(*(8 if one == dim + 1 else 1 for one in range(split.dim())))
    return (split << shifts).sum(dim + 1, dtype=torch.int32)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("checkpoint", ["compressed-tensors", "gptq"])
def test_layer_equals_its_weights(checkpoint: str, zero_points: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import parameter
    from vllm.scalar_type import scalar_types

    from strata.kernels.vllm_plugin.linear import StrataW4A16LinearKernel

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    generator = torch.Generator().manual_seed(0)
    nibbles = torch.randint(0, 16, (INPUTS, OUTPUTS), generator=generator)
    scales = torch.rand(INPUTS // GROUP, OUTPUTS, generator=generator).bfloat16()
    zeros = torch.randint(0, 16, scales.shape, generator=generator) if zero_points else torch.full(scales.shape, 8)
    by_output = checkpoint == "compressed-tensors"  # [outputs, inputs / 8], and GPTQ's layout is its transpose

    layer = torch.nn.Module()
    common = {"weight_loader": lambda *_: None, "input_dim": int(by_output), "output_dim": int(not by_output)}
    packed = words(nibbles.T, 1) if by_output else words(nibbles, 0)
    layer.register_parameter(
        "weight", parameter.PackedvLLMParameter(data=packed, packed_dim=int(by_output), packed_factor=8, **common)
    )
    layer.register_parameter(
        "scale", parameter.GroupQuantScaleParameter(data=(scales.T if by_output else scales).contiguous(), **common)
    )
    layer.register_parameter(
        "zero",
        parameter.PackedvLLMParameter(
            data=words(zeros.T, 0), packed_dim=0, packed_factor=8, weight_loader=lambda *_: None, input_dim=1, output_dim=0
        ),
    )
    config = layer_config(zero_points=zero_points, weight_type=scalar_types.uint4 if zero_points else scalar_types.uint4b8)
    kernel = StrataW4A16LinearKernel(config, "weight", "scale", "zero")
    kernel.process_weights_after_loading(layer)

    x = torch.randn(2, 3, INPUTS, generator=generator).bfloat16()
    bias = torch.randn(OUTPUTS, generator=generator).bfloat16()
    weight = (nibbles - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)
    expected = x.float() @ weight + bias.float()
    got = kernel.apply_weights(layer, x, bias).float()
    assert got.shape == expected.shape and (got - expected).norm() < 4e-3 * expected.norm()
